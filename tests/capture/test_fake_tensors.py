"""A model without memory has the graph of the real one, and its nodes are real one at a time."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipedream.capture.captured import Captured, flatten_inputs
from pipedream.capture.export import capture
from pipedream.capture.fake_tensors import capture_fake, random_tensor, real_node_module
from pipedream.capture.sources.load import load
from pipedream.graph.errors import UserError

CPU = torch.device("cpu")
LAYERS = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 50}
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "torchvision:resnet18": ({}, ("3x32x32",)),
    "torchvision:swin_t": ({}, ("3x32x32",)),
    "timm:test_vit": ({"img_size": 32}, ()),
    "transformers:llama": ({**LAYERS, "intermediate_size": 16}, ()),
    "transformers:bert": ({**LAYERS, "intermediate_size": 16}, ()),
    "transformers:gpt2": ({"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50}, ()),
}


class Wide(nn.Module):
    """Four layers of 1 MB and one of 4 MB; two of the small ones are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(4))
        self.small[3].weight = self.small[0].weight
        self.large = nn.Linear(512, 2048, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.small:
            x = layer(x).relu()
        return self.large(x)


def named_device() -> nn.Module:
    return nn.Linear(2, 2, device="cpu")


def with_inputs(batch_size: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Embedding(3, 4), (torch.full((batch_size, 5), 2),)


def walk(captured: Captured, inputs: list[Tensor]) -> None:
    """Every node forward and backward, alone."""
    own = dict(zip(captured.inputs, inputs, strict=True))
    for node in captured.graph.order:
        if captured.graph.nodes[node].is_input:
            continue
        with real_node_module(captured, node, CPU) as module:
            values = {
                name: own[name]
                if name in own
                else random_tensor(captured.values[name].shape, captured.values[name].dtype, CPU)
                for name in module.segment.inputs
            }
            given = module.inputs(values)
            outputs = module.segment.module(*given)
            for name, output in zip(module.segment.outputs, outputs, strict=True):
                value = captured.values[name]
                assert (tuple(output.shape), output.dtype) == (value.shape, value.dtype)
            begin, wanted = module.ends(given, outputs)
            if begin and wanted:
                gradients = [torch.ones_like(each) for each in begin]
                torch.autograd.grad(begin, wanted, gradients, allow_unused=True)


@pytest.mark.one_in(8)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_graph_and_bytes_are_those_of_the_real_model_and_every_node_runs(name: str) -> None:
    args, inputs = MODELS[name]
    real, other = (load(name, args, 2, inputs, meta=meta) for meta in (False, True))
    assert {parameter.device.type for parameter in other.model.parameters()} == {"meta"}
    expected = capture(real.model, real.args, real.kwargs)
    captured = capture_fake(other.model, other.args, other.kwargs)
    assert captured.graph == expected.graph
    assert captured.values == expected.values
    assert captured.parameters == expected.parameters
    walk(captured, flatten_inputs(other.args, other.kwargs))


def real_bytes() -> int:
    """Of all tensors with memory that Python knows of, each storage once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    storages = {each.untyped_storage()._cdata: each for each in tensors if each.device == CPU}
    return sum(each.untyped_storage().nbytes() for each in storages.values())


@pytest.mark.thorough
@pytest.mark.slow
def test_only_one_node_has_memory_at_a_time() -> None:
    with torch.device("meta"):
        model = Wide()
    before = real_bytes()
    captured = capture_fake(model, (torch.zeros(1, 512),))
    assert sum(node.parameter_bytes for node in captured.graph.nodes.values()) == 7 * 2**20
    kept, alive = [], []
    for node in captured.graph.order[1:]:
        with real_node_module(captured, node, CPU) as module:
            alive.append(real_bytes() - before)
            kept.append(module)  # whoever holds on to a module does not hold its memory
    assert max(alive) == pytest.approx(4 * 2**20, rel=0.01)
    assert real_bytes() - before < 2**16
    assert all(isinstance(each, FakeTensor) for each in captured.module.parameters())


def test_a_factory_may_give_inputs_and_may_not_name_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for factory in (named_device, with_inputs):
        monkeypatch.setattr(f"torch.nn.{factory.__name__}", factory, raising=False)
    loaded = load("torch.nn:with_inputs", {}, 2, meta=True)
    assert loaded.args[0].tolist() == [[0] * 5] * 2, "on the CPU, and indices"
    with pytest.raises(UserError, match="it creates weight on cpu; leave device= out"):
        load("torch.nn:named_device", {}, 2, ("2",), meta=True)

"""Models as people write them: captured at two batch sizes they have one graph and one gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint_sequential

from pipedream.capture.captured import flatten_inputs, rebuild
from pipedream.capture.export import capture
from pipedream.capture.sources.load import load


class Pair(NamedTuple):
    first: Tensor
    rest: list[Any]


class Model(nn.Module):
    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.function = function
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def looped(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = F.relu(block(x)) + x
    return x


def keywords(model: Model, x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    y = model.blocks[0](x) * scale
    return y if mask is None else y * mask


def of_a_dict(model: Model, batch: dict[str, Any]) -> dict[str, Any]:
    inside = model.blocks[0](batch["x"]) + batch["more"][0]
    return {"logits": inside, "hidden": [(inside * 2,), {"none": None}], "size": 4, "name": "a"}


def statistics(model: Model, x: Tensor) -> Tensor:
    model.count += 1
    with torch.no_grad():
        model.mean.lerp_(x.mean(0), 0.1)
    return model.blocks[0](x - model.mean) / model.count


def assigned_buffer(model: Model, x: Tensor) -> Tensor:
    model.count = model.count + 1
    return model.blocks[0](x) / model.count


def tied(model: Model, x: Tensor) -> Tensor:
    return F.linear(model.blocks[0](x), model.blocks[0].weight)


def checkpointed(model: Model, x: Tensor) -> Tensor:
    return checkpoint_sequential(list(model.blocks), 2, x, use_reentrant=False)


def lowered(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = model.blocks[0](x)
    return model.blocks[1](y.float())


def sized(model: Model, x: Tensor) -> Tensor:
    """It computes with the batch size itself."""
    batch = x.shape[0]
    zeros = x.new_zeros(batch, 4)
    return model.blocks[0](x.view(batch, 2, 2).flatten(1) + zeros) / batch + torch.arange(
        batch
    ).unsqueeze(1)


def tensor(batch: int) -> Tensor:
    return torch.randn(batch, 4)


Inputs = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]


def one(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tensor(batch),), {}


CASES: dict[str, tuple[Callable[..., Any], Inputs]] = {
    "looped": (looped, one),
    "keywords": (
        keywords,
        lambda batch: ((tensor(batch),), {"mask": tensor(batch), "scale": 2.0}),
    ),
    "dict": (
        of_a_dict,
        lambda batch: (({"x": tensor(batch), "more": [tensor(batch)]},), {}),
    ),
    "scalars": (
        lambda model, x, scale, power, number: model.blocks[0](x) * scale * number**power,
        lambda batch: ((tensor(batch), torch.tensor(3.0), 2, 1.5), {}),
    ),
    "named tuple": (lambda model, x: Pair(model.blocks[0](x), [x, {"y": x + 1}]), one),
    "statistics": (statistics, one),
    "assigned buffer": (assigned_buffer, one),
    "tied": (tied, one),
    "checkpointed": (checkpointed, one),
    "autocast": (lowered, one),
    "batch size": (sized, one),
    "returned twice": (lambda model, x: (lambda y: (y, y, x))(model.blocks[0](x)), one),
    "input unused": (
        lambda model, x, y: model.blocks[0](x),
        lambda batch: ((tensor(batch), tensor(batch)), {}),
    ),
    "input written": (lambda model, x: model.blocks[0](x.clone().mul_(2)), one),
    "dropout": (lambda model, x: F.dropout(model.blocks[0](x), 0.5, model.training), one),
}


def outputs(returned: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]


def kind(leaf: Any) -> Any:
    return "tensor" if isinstance(leaf, Tensor) else leaf


def learn(module: nn.Module, run: Callable[[], Any]) -> tuple[Any, dict[str, Tensor]]:
    """What `run` returns, and the gradients of the parameters of `module`."""
    torch.manual_seed(1)
    module.zero_grad()
    returned = run()
    sum(each.square().sum() for each in outputs(returned) if each.requires_grad).backward()
    named = dict(module.named_parameters())
    return returned, {name: p.grad.clone() for name, p in named.items() if p.grad is not None}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_a_users_model_at_two_batch_sizes(name: str) -> None:
    function, make = CASES[name]
    torch.manual_seed(0)
    model = Model(function)
    prints = set()
    for batch in (4, 8):
        args, kwargs = make(batch)
        captured = capture(model, args, kwargs)
        prints.add(captured.graph.fingerprint)
        args, kwargs = make(batch)
        before = {key: value.clone() for key, value in model.named_buffers()}
        expected, gradients = learn(model, lambda args=args, kwargs=kwargs: model(*args, **kwargs))
        after = {key: value.clone() for key, value in model.named_buffers()}
        with torch.no_grad():
            for key, value in captured.module.named_buffers():
                if key in before:
                    value.copy_(before[key])
        inputs = flatten_inputs(args, kwargs)
        found, own = learn(
            captured.module,
            lambda captured=captured, inputs=inputs: rebuild(
                captured.module(*inputs), captured.out_spec
            ),
        )
        assert type(found) is type(expected)
        assert pytree.tree_map(kind, found) == pytree.tree_map(kind, expected)
        torch.testing.assert_close(outputs(found), outputs(expected), rtol=0, atol=0)
        assert own.keys() == gradients.keys()
        torch.testing.assert_close(own, gradients, rtol=0, atol=0)
        for key, value in captured.module.named_buffers():
            torch.testing.assert_close(value, after.get(key, value))
    assert len(prints) == 1


def with_names() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return Model(keywords), (tensor(2),), {"mask": tensor(2)}


def test_a_factory_may_give_named_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.with_names", with_names, raising=False)
    loaded = load("torch.nn:with_names", {}, 2)
    assert set(loaded.kwargs) == {"mask"}
    assert len(capture(loaded.model, loaded.args, loaded.kwargs).inputs) == 2

"""What nodes save: worked out by hand, and against what the whole model keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from pipedream.capture.export import capture
from pipedream.graph.profile import Footprint
from pipedream.profiler.memory import footprints

CPU = torch.device("cpu")


def by_description(model: nn.Module, *inputs: Tensor) -> dict[str, Footprint]:
    captured = capture(model, inputs)
    found = footprints(captured, inputs, CPU)
    return {
        node.description.partition("(")[0]: found[name]
        for name, node in captured.graph.nodes.items()
    }


def test_each_storage_is_booked_once_on_the_node_that_makes_it() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5), nn.Tanh())
    found = by_description(model, torch.randn(8, 10))
    # The first layer keeps the input; ReLU its own result, which the second layer keeps, too; Tanh
    # its own result. Linear layers make nothing that is kept.
    assert found["Input0"].saved == 8 * 10 * 4
    assert found["ReLU"].saved == 8 * 20 * 4
    assert found["Tanh"].saved == 8 * 5 * 4
    # Of ReLU: the gradients of its output and its input.
    assert found["ReLU"].workspace == 2 * 8 * 20 * 4


def test_the_workspace_of_a_layer_has_the_gradients_of_its_parameters() -> None:
    found = by_description(nn.Sequential(nn.Linear(100, 200)), torch.randn(4, 100))
    assert found["Linear"].workspace >= (200 * 100 + 200) * 4 + 4 * 200 * 4


def test_inside_a_node_and_not_for_parameters_and_buffers() -> None:
    found = by_description(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), torch.randn(8, 6))
    # Batch norm keeps its input, which the linear layer makes, and the mean and deviation.
    assert found["Linear"].saved == 8 * 6 * 4
    assert found["BatchNorm1d"].saved == 2 * 6 * 4


class Views(nn.Module):
    """Two chunks of one storage, both kept by the product."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.both(x).chunk(2, dim=-1)
        return one * two


def test_views_are_booked_on_whoever_made_the_memory() -> None:
    found = by_description(Views(), torch.randn(8, 6))
    assert found["Linear"].saved == 8 * 12 * 4
    assert sum(kept.saved for name, kept in found.items() if name not in ("Linear", "Input0")) == 0


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.out = nn.Dropout(0.3), nn.Linear(8 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm(self.conv(x)))
        y = self.drop(F.max_pool2d(y + torch.sigmoid(y), 2))
        return self.out(y.flatten(1)).softmax(-1)


@pytest.mark.parametrize("model", [Views, Mixed])
def test_the_sum_over_nodes_is_what_the_whole_model_keeps(model: type[nn.Module]) -> None:
    made = model().train()
    x = torch.randn(8, 3, 8, 8) if model is Mixed else torch.randn(8, 6)
    before = {name: buffer.clone() for name, buffer in made.named_buffers()}
    captured = capture(made, (x,))
    booked = sum(kept.saved for kept in footprints(captured, [x], CPU).values())
    for name, buffer in made.named_buffers():
        assert torch.equal(buffer, before[name]), name
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = made(x)
    for tensor in (*made.parameters(), *made.buffers()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    assert output.requires_grad
    assert booked == sum(kept.values())

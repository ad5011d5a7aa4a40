"""Means written as sums and divisions: the values of both passes stay what they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from joint_models import MODELS, Traced, trace, traced_model
from torch import Tensor, fx, nn
from torch.nn import functional as F

_WEIGHT = torch.rand(4, dtype=torch.float64)
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(1).exp().sum(),
    "classes": lambda x: F.cross_entropy(x, torch.tensor([0, 3, 1]), _WEIGHT, ignore_index=1),
    "squares": lambda x: F.mse_loss(x, torch.ones_like(x)),
    "default": lambda x: F.smooth_l1_loss(x, torch.ones_like(x), beta=0.3),
    "huber": lambda x: F.huber_loss(x, torch.ones_like(x), delta=0.3),
    "probabilities": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)),
    "logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "sum": lambda x: F.mse_loss(x, torch.ones_like(x), reduction="sum"),
}


class Lossy(nn.Module):
    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(5, 4), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.layer(x))


def results(traced: Traced) -> list[Tensor]:
    """Of the graph: outputs and gradients."""
    torch.manual_seed(2)
    joint = traced.joint
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    values = [traced.values[node].clone() for node in placeholders]
    found = fx.Interpreter(joint.module).run(*values)
    return [each for each in found if each is not None]


def same(make: Callable[[bool], Traced]) -> None:
    before, after = (results(make(means)) for means in (True, False))
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    def make(means: bool) -> Traced:
        torch.manual_seed(1)
        return trace(Lossy(LOSSES[name]), (torch.randn(3, 5),), means)

    same(make)
    left = {str(node.target) for node in make(False).joint.module.graph.nodes}
    assert not {target for target in left if target.startswith("aten.mean")}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    def make(means: bool) -> Traced:
        torch.manual_seed(1)
        return traced_model(name, means)

    same(make)


def test_the_ends_are_nodes_of_the_graph() -> None:
    joint = traced_model("mlp", means=False).joint
    (end,) = joint.module.graph.find_nodes(op="output")
    gradients = [*joint.input_gradients, *joint.weight_gradients.values()]
    assert list(end.args[0]) == [*joint.outputs, *(each for each in gradients if each is not None)]

"""Stages that cannot be divided go through their autograd graph twice, and learn the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import small_models
import torch
from one_rank import OneRank, none_halved, regression
from torch import Tensor, nn


class Straight(torch.autograd.Function):
    """What it does backwards is Python, which a trace would run once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@torch.library.custom_op("pipedream_tests::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * float(x.detach().abs().sum())


@torch.library.custom_op("pipedream_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


def _by_value(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient * float(gradient.abs().sum() > 1e-3)


def _in_place(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient.clone().mul_(2)


for each, backward in ((scaled, _by_value), (doubled, _in_place)):
    each.register_fake(torch.empty_like)
    each.register_autograd(backward)


class Between(nn.Module):
    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = (small_models.Layer(6) for _ in range(3))
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.operator(self.b(self.a(x))))


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("operator", "why"),
    [
        (Straight.apply, "code of the user's"),
        (scaled, "DataDependent"),
        (doubled, None),
    ],
)
def test_stages_that_cannot_be_divided(
    operator: Callable[[Tensor], Tensor], why: str | None, recompute: bool
) -> None:
    """The other stages run as programs; so does one whose backward pass writes in place (None)."""
    torch.manual_seed(3)
    model = Between(operator).double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    halves = OneRank(model, regression(), 3, recompute=recompute).train()
    again = Between(operator).double()
    again.load_state_dict(before)
    whole = OneRank(again, regression(), 3, halved=none_halved, recompute=recompute).train()
    torch.testing.assert_close(halves.losses, whole.losses, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(halves.state, whole.state, rtol=0.0, atol=1e-12)
    told = [text for text in halves.obstacles if text is not None]
    assert len(told) == (why is not None)
    assert all(why in text for text in told if why is not None)

"""A model with operators of the user's own, forward and backward, which no rule knows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

library = torch.library.Library("user_operators", "DEF")
library.define("gated(Tensor x, Tensor gate) -> Tensor")
library.define("gated_backward(Tensor grad, Tensor x, Tensor gate) -> (Tensor, Tensor)")


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


def _gated_backward(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    share = torch.sigmoid(gate)
    return grad * share, grad * x * share * (1 - share)


library.impl("gated", _gated, "CPU")
library.impl("gated", lambda x, gate: torch.empty_like(x), "Meta")
library.impl("gated_backward", _gated_backward, "CPU")
library.impl(
    "gated_backward", lambda grad, x, gate: (torch.empty_like(x), torch.empty_like(gate)), "Meta"
)
torch.library.register_autograd(
    "user_operators::gated",
    lambda ctx, grad: torch.ops.user_operators.gated_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=library,
)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 64), nn.Linear(6, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.ops.user_operators.gated(self.up(x), self.gate(x)))
        return result


def points() -> TensorDataset:
    drawn = torch.Generator().manual_seed(5)
    x = torch.randn(22, 6, generator=drawn, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (22,), generator=drawn))

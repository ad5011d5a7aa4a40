"""Operators of the user's own, forward and backward, which no rule knows."""

from __future__ import annotations

import torch
from torch import Tensor

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

"""A network whose products sleep for as long as their flops would take on a slow device, and then
give what is right: many devices share few cores, and what is real are messages and runtime.

Its operator is one of the user's own, which no rule knows: how it is divided is found by
running it.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

FLOPS = 2e9
"""Per second of a device."""
WIDTH, LAYERS, BATCH, CLASSES = 512, 6, 64, 16

library = torch.library.Library("asleep", "DEF")
library.define("product(Tensor x, Tensor weight) -> Tensor")
library.define("product_backward(Tensor grad, Tensor x, Tensor weight) -> (Tensor, Tensor)")


def _product(x: Tensor, weight: Tensor) -> Tensor:
    until = time.perf_counter() + 2.0 * x.shape[0] * weight.numel() / FLOPS
    result = x @ weight
    time.sleep(max(0.0, until - time.perf_counter()))
    return result


def _backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _product(grad, weight.t()), _product(x.t(), grad)


library.impl("product", _product, "CPU")
library.impl("product", lambda x, weight: x.new_empty(x.shape[0], weight.shape[1]), "Meta")
library.impl("product_backward", _backward, "CPU")
library.impl(
    "product_backward",
    lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight)),
    "Meta",
)
torch.library.register_autograd(
    "asleep::product",
    lambda ctx, grad: torch.ops.asleep.product_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=library,
)


class Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.asleep.product(x, self.weight)
        return result


def network() -> nn.Module:
    inner = (part for _ in range(LAYERS - 1) for part in (Layer(WIDTH, WIDTH), nn.ReLU()))
    return nn.Sequential(*inner, Layer(WIDTH, CLASSES))


def data(examples: int = 24 * BATCH) -> tuple[TensorDataset, None]:
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(examples, WIDTH, generator=drawn)
    return TensorDataset(x, torch.randint(0, CLASSES, (examples,), generator=drawn)), None

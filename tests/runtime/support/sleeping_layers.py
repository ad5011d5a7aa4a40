"""Layers that sleep, so that passes take the same on a machine that is busy; they learn, too."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SECONDS = 0.002
"""Of a layer, forward and backward each."""


@torch.library.custom_op("sleeping::layer", mutates_args=())
def _sleep(values: Tensor) -> Tensor:
    time.sleep(SECONDS)
    return values.clone()


@_sleep.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values)


def _backward(context: Any, gradient: Tensor) -> Tensor:
    time.sleep(SECONDS)
    return gradient


torch.library.register_autograd("sleeping::layer", _backward)


class Sleeping(nn.Module):
    """A small layer [batch, 6] -> [batch, 6] that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, values: Tensor) -> Tensor:
        return _sleep(torch.tanh(self.linear(values)))


def chain(layers: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Sleeping() for _ in range(layers)))


def data(examples: int) -> tuple[TensorDataset, None]:
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(examples, 6, generator=draw)
    return TensorDataset(values, values.roll(1, 1)), None

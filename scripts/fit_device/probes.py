"""Models that exist for the sizes of their layers."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


def products(widths: list[int], batch_size: int) -> tuple[nn.Module, tuple[Tensor]]:
    """Returns linear layers from each width to the next, with activations between them."""
    layers: list[nn.Module] = []
    activations = itertools.cycle([nn.GELU(), nn.ReLU(), nn.SiLU(), nn.Tanh(), nn.Dropout(0.1)])
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), next(activations)]
    return nn.Sequential(*layers), (torch.randn(batch_size, widths[0]),)

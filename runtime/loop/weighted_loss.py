"""The loss of a microbatch as its part of a mean over the minibatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedream.capture.compute_settings import Precision
from pipedream.capture.loss import Loss


@dataclass(frozen=True)
class WeightedLoss:
    """`loss`, of what the model returns, and a target that comes with its microbatch's factor."""

    loss: Loss
    precision: Precision

    def __call__(self, output: Any, target: tuple[Any, float]) -> Tensor:
        target, factor = target
        if factor == 0.0 or factor != factor:
            return _uncounted(output, factor)
        with self.precision.computing():
            return self.loss(output, target) * factor


def _uncounted(output: Any, value: float) -> Tensor:
    """The loss of a microbatch in which nothing counts, such as one without labels: its mean would
    be 0 / 0. All gradients are zero.
    """
    loss = torch.tensor(value)
    for tensor in pytree.tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            nothing = torch.zeros_like(tensor)
            loss = loss.to(tensor) + nothing.where(nothing == 0, tensor).sum()
    return loss

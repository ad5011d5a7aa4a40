"""A minibatch of a loop of the user's own, cut into microbatches, and their part of the loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedream.capture.compute_settings import Precision
from pipedream.capture.loss import Loss
from pipedream.comm.device.copies import to_device
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.data.order import Sizes
from pipedream.runtime.stages.stage_forms import Call, part_of


@dataclass(frozen=True)
class SplitMinibatch:
    """The microbatches of a minibatch; the loss of each counts `factors` times."""

    calls: Sequence[Call]
    targets: Sequence[Any]
    factors: Sequence[float]
    device: torch.device

    @staticmethod
    def of(
        calls: Sequence[Call], target: Any, weights: Tensor, parts: int, device: torch.device
    ) -> SplitMinibatch:
        """`calls` were split into so many `parts`; `weights`: how much each example counts, as a
        tensor [examples].
        """
        factors = [float(call.tensors[0].sum()) for call in Call((weights,), {}).split(parts)]
        ends = accumulate(map(len, calls))
        slices = [slice(end - len(call), end) for call, end in zip(calls, ends, strict=True)]
        return SplitMinibatch(calls, [part_of(target, own) for own in slices], factors, device)

    @property
    def sizes(self) -> Sizes:
        return Sizes(sum(map(len, self.calls)), len(self.calls[0]))

    def times(self, factors: Sequence[float]) -> SplitMinibatch:
        """Returns it with each microbatch counting so many times as much."""
        pairs = zip(self.factors, factors, strict=True)
        return replace(self, factors=[one * other for one, other in pairs])

    def inputs(self, minibatch: int, which: Iterable[int]) -> list[Tensor]:
        tensors = self.calls[minibatch].tensors
        return [to_device(tensors[position], self.device) for position in which]

    def peek(self, minibatch: int) -> Batch:
        return Batch(tuple(self.calls[minibatch].tensors), self.targets[minibatch])

    @property
    def batches(self) -> list[Batch]:
        """The microbatches with what the loss takes as their targets."""
        triples = zip(self.calls, self.targets, self.factors, strict=True)
        return [Batch(tuple(call.tensors), (target, factor)) for call, target, factor in triples]

    def target(self, minibatch: int) -> tuple[Any, float]:
        move = partial(to_device, device=self.device)
        return pytree.tree_map_only(Tensor, move, self.targets[minibatch]), self.factors[minibatch]


@dataclass(frozen=True)
class WeightedLoss:
    """Computes `loss` of what the model returns, for a target that comes with its factor."""

    loss: Loss
    precision: Precision

    def __call__(self, output: Any, target: tuple[Any, float]) -> Tensor:
        target, factor = target
        if factor == 0.0 or factor != factor:
            return _uncounted(output, factor)
        with self.precision.computing():
            return self.loss(output, target) * factor


def _uncounted(output: Any, value: float) -> Tensor:
    """Returns the loss of a microbatch in which nothing counts, such as one without labels: its
    mean would be 0 / 0. All gradients are zero.
    """
    loss = torch.tensor(value)
    for tensor in pytree.tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            zeros = torch.zeros_like(tensor)
            loss = loss.to(tensor) + zeros.where(zeros == 0, tensor).sum()
    return loss

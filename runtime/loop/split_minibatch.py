"""A minibatch of a loop of the user's own, cut into microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedream.runtime.data.order import Sizes
from pipedream.runtime.data.reader import Batch
from pipedream.runtime.stages.by_kind import Call, part_of


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
        """Of calls that were split into so many `parts`; `weights`: how much each example counts,
        as a tensor [examples].
        """
        cut = Call((weights,), {}).split(parts)
        factors = [float(call.tensors[0].sum()) for call in cut]
        return SplitMinibatch(calls, _cut(target, calls), factors, device)

    @property
    def sizes(self) -> Sizes:
        return Sizes(sum(map(len, self.calls)), len(self.calls[0]))

    def times(self, factors: Sequence[float]) -> SplitMinibatch:
        """Each microbatch counts so many times as much."""
        pairs = zip(self.factors, factors, strict=True)
        return replace(self, factors=[one * other for one, other in pairs])

    def inputs(self, minibatch: int, which: Iterable[int]) -> list[Tensor]:
        tensors = self.calls[minibatch].tensors
        return [tensors[position].to(self.device) for position in which]

    def peek(self, minibatch: int) -> Batch:
        return Batch(tuple(self.calls[minibatch].tensors), self.targets[minibatch])

    @property
    def batches(self) -> list[Batch]:
        """The microbatches with what the loss takes as their targets."""
        triples = zip(self.calls, self.targets, self.factors, strict=True)
        return [Batch(tuple(call.tensors), (target, factor)) for call, target, factor in triples]

    def target(self, minibatch: int) -> tuple[Any, float]:
        target = pytree.tree_map_only(Tensor, lambda x: x.to(self.device), self.targets[minibatch])
        return target, self.factors[minibatch]


def _cut(target: Any, calls: Sequence[Call]) -> list[Any]:
    """The part of `target` for each call."""
    ends = list(accumulate(len(call) for call in calls))
    return [
        part_of(target, slice(end - len(call), end)) for call, end in zip(calls, ends, strict=True)
    ]

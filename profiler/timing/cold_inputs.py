"""Inputs of operators in memory that no cache holds, as they are found in training.

To clear the caches takes as long as reading twice what they hold: a tenth of a second where that
is 480 MB, as often as an operator of a millisecond is repeated. So many executions share a clear:
each has inputs that no other since has touched, and results are kept, so that those of the next are
put elsewhere. Only what is near is cleared before each: an operator repeated at once finds its code
and its scratch memory nearer than in training, where others have been in between.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from pipedream.capture.programs.description import dtype_of, executable
from pipedream.graph.placements.operators import Operator, TensorType
from pipedream.profiler.timing.stopwatch import stopwatch

_APART = 64
"""Elements to whose multiples inputs are aligned, as vector instructions read them best."""
_DRAWN = 1 << 22
"""So many numbers are drawn and then repeated: drawing takes longer than copying."""


class ColdInputs:
    """Numbers from 0 to 1, which are probabilities too; or zeros, which are valid indices.

    `between`: bytes that a minibatch touches from one execution of an operator to the next, which
    is what a clear takes through the caches.
    """

    def __init__(self, device: torch.device, between: int) -> None:
        self.device = device
        self.watch = stopwatch(device, between)
        self.touched = math.inf  # since the last clear
        self.drawn: dict[torch.dtype, Tensor] = {}
        self.taken = Counter[torch.dtype]()  # elements of each tensor drawn, since then
        self.results: list[object] = []
        # results are put there in turn: the heap must have grown, and its pages been written
        torch.ones(self.watch.room, dtype=torch.uint8, device=device)

    def of(self, operator: Operator) -> list[Tensor]:
        """Returns what the operator can be executed on once."""
        touched, needed = touched_by(operator), Counter[torch.dtype]()
        for type_ in operator.inputs:
            if _is_drawn(dtype := dtype_of(type_)):
                needed[dtype] += _aligned(type_)
        if self.touched + touched > self.watch.room or not self._have(needed):
            self.results.clear()
            self._draw(needed)
            self.watch.clear()
            self.taken.clear()
            self.touched = 0
        else:
            self.watch.clear_near()
        self.touched += touched
        inputs = [self._next(type_) for type_ in operator.inputs]
        if executable(operator)._schema.is_mutable:  # written over and over, numbers may vanish
            return [each.clone() for each in inputs]
        return inputs

    def keep(self, results: object) -> None:
        """Notes what an execution gave."""
        self.results.append(results)

    def _have(self, needed: Counter[torch.dtype]) -> bool:
        """Tells whether so many elements have been drawn and not been taken."""
        return all(
            dtype in self.drawn and self.taken[dtype] + count <= self.drawn[dtype].numel()
            for dtype, count in needed.items()
        )

    def _draw(self, needed: Counter[torch.dtype]) -> None:
        for dtype, count in needed.items():
            if dtype not in self.drawn or self.drawn[dtype].numel() < count:
                self.drawn.pop(dtype, None)
                size = max(count, self.watch.room // dtype.itemsize)
                unit = torch.rand(min(size, _DRAWN), dtype=dtype, device=self.device)
                self.drawn[dtype] = unit.repeat(math.ceil(size / _DRAWN))

    def _next(self, type_: TensorType) -> Tensor:
        dtype, order = dtype_of(type_), type_.order or range(len(type_.shape))
        shape = [type_.shape[dim] for dim in order]
        if _is_drawn(dtype):
            begin = self.taken[dtype]
            self.taken[dtype] += _aligned(type_)
            laid = self.drawn[dtype][begin : begin + math.prod(shape)].view(shape)
        else:
            laid = torch.zeros(shape, dtype=dtype, device=self.device)
        return laid.permute([*map(list(order).index, range(len(shape)))])


def touched_by(operator: Operator) -> int:
    """Returns the bytes of its inputs and outputs; at least one."""
    types = (*operator.inputs, *(type_ for type_ in operator.outputs if type_ is not None))
    return sum(math.prod(type_.shape) * type_.element_bytes for type_ in types) or 1


def _is_drawn(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _aligned(type_: TensorType) -> int:
    """Returns the elements taken for a tensor."""
    return math.ceil(math.prod(type_.shape) / _APART) * _APART

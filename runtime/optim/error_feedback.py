"""Error feedback: an update that was made in place of one not yet known is made good once that is.

The gradient that makes version t + 1 of a stage out of w(t) was found at an older version, w(v),
v < t. So the step u(t) belongs to update v, which had to be made before its gradient was there: in
its place u(v) was, the step of the gradient that had come by then. Now that it is known, the
difference is made up for, as large as the learning rate makes it now:

    w(t+1) = w(t) + u(t) + c (u(t) - lr(t) / lr(v) u(v))

with c = 1 for the whole of it. Under 2BW v = t - 1, which is the form of arXiv 2606.30634 (ICML
2026). `Schedule.makes_good` says in general which update it is: each at most once, and none whose
own gradient was not late. With a constant rate the sum of all
steps is that of plain training, and the last d of them once more: gradients are found d steps ahead
of what they change.

The steps that are still to be made good are kept, d of them where gradients are d updates late. A
drained pipeline has none: what it leaves stands, and a checkpoint needs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

_TOGETHER = 1 << 23
"""Bytes of parameters whose steps are computed at a time: beside the optimizer's own, no more
memory than that is needed at once."""

Rates: TypeAlias = dict[Parameter, float]


@dataclass(eq=False)
class _Step:
    """One that is to be made good: what it added to each parameter, at which learning rate."""

    tensors: dict[Parameter, Tensor]
    rates: Rates


class ErrorFeedback:
    """Makes up for late updates of one stage, in hooks on its `optimizer`: see the module.

    Register others that change the learning rate before it. A step that is left out calls no hooks:
    there is nothing of it to be made good, nor does it make good another.
    """

    def __init__(self, optimizer: Optimizer, strength: float) -> None:
        self.optimizer, self.strength = optimizer, strength
        self.makes_good: Mapping[int, int] = {}
        self.kept: Collection[int] = ()
        self.steps: dict[int, _Step] = {}
        self.number = 0
        self.before: dict[Parameter, Tensor] = {}
        self.rates: Rates = {}
        self.spare: dict[Parameter, list[Tensor]] = {}
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def begin(self) -> None:
        """Prepares for a segment: nothing is late."""
        self.makes_good, self.kept, self.steps = {}, (), {}

    def follow(self, makes_good: Mapping[int, int]) -> None:
        """Sets which update of the segment makes good which earlier one, by the numbers of the
        versions that they make. Call again if the segment is replaced.
        """
        self.makes_good, self.kept = makes_good, frozenset(makes_good.values())

    def expect(self, number: int, stood: Mapping[Parameter, Tensor]) -> None:
        """Called before the update that makes version `number`. `stood`: copies of parameters as
        they are, which stay; those of the others are made where they are needed.
        """
        self.number, self.before = number, dict(stood)
        first = self.makes_good.get(number, 0)
        for missed in [each for each in self.steps if each < first]:
            del self.steps[missed]  # the update that would have made it good was left out

    @property
    def _is_kept(self) -> bool:
        return self.number in self.kept

    def _take_made_good(self) -> _Step | None:
        return self.steps.pop(self.makes_good.get(self.number, -1), None)

    def _before(self, *_: object) -> None:
        if not self._is_kept and self.makes_good.get(self.number) not in self.steps:
            self.before = {}
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.rates[parameter] = float(group["lr"])
                    if parameter not in self.before:
                        self.before[parameter] = parameter.data.clone()

    @torch.no_grad()
    def _after(self, *_: object) -> None:
        late, kept = self._take_made_good(), _Step({}, self.rates)
        for parameters in _batches([each for each in self.rates if each in self.before]):
            now = [parameter.data for parameter in parameters]
            steps = torch._foreach_sub(now, [self.before[each] for each in parameters])
            if late is not None:
                self._make_good(parameters, steps, late)
            if self._is_kept:
                kept.tensors.update(
                    zip(parameters, map(self._kept, parameters, steps), strict=True)
                )
        if kept.tensors:
            self.steps[self.number] = kept
        self.before, self.rates = {}, {}

    def _make_good(
        self, parameters: Sequence[Parameter], steps: Sequence[Tensor], late: _Step
    ) -> None:
        both = [
            (parameter, step)
            for parameter, step in zip(parameters, steps, strict=True)
            if parameter in late.tensors
        ]
        if not both:
            return
        now = [parameter.data for parameter, _ in both]
        olds = [late.tensors.pop(parameter) for parameter, _ in both]
        factors = [
            self.strength * self.rates[parameter] / late.rates[parameter]
            if late.rates[parameter]
            else 0.0
            for parameter, _ in both
        ]
        torch._foreach_add_(now, [step for _, step in both], alpha=self.strength)
        torch._foreach_mul_(olds, factors)
        torch._foreach_sub_(now, olds)
        for (parameter, _), old in zip(both, olds, strict=True):
            self.spare.setdefault(parameter, []).append(old)

    def _kept(self, parameter: Parameter, step: Tensor) -> Tensor:
        """Returns a step in memory of one that has been made good, if there is some: what lasts is
        not to lie among what comes and goes.
        """
        spare = self.spare.get(parameter)
        return spare.pop().copy_(step) if spare else step


def _batches(parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Yields those of one type and device, about `_TOGETHER` bytes at a time."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for alike in kinds.values():
        ends, size = [0], 0
        for index, parameter in enumerate(alike):
            size += parameter.nbytes
            if size >= _TOGETHER:
                ends.append(index + 1)
                size = 0
        yield from (alike[a:b] for a, b in pairwise([*ends, len(alike)]) if a < b)

"""Finds out which groups of operators are faster compiled, each by itself.

Groups run within a pass of the whole model, on the tensors that they are given there. Of those that
are equal the first is run several times as it is and as it is compiled, in turns, since it depends
on the group: compiling wins much where norms and activations are, and loses where one large product
is all that there is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from pipedream.capture.grouped import Group
from pipedream.graph.profile import ProfiledGroups
from pipedream.profiler.memory import address, saving
from pipedream.profiler.stretches.timed_stretch import WORTH_COMPILING, furthest_off
from pipedream.profiler.timing.passes import RandomGradients, gradients_of
from pipedream.profiler.timing.stopwatch import Stopwatch

Function: TypeAlias = Callable[..., Any]

_TURNS = 3, 25
"""At least and at most."""
_SECONDS = 0.5
"""Of the turns of a group, once there are enough."""


@dataclass
class GroupTrial:
    """Used as `capture.compiled.Trial`: `tried`, by form, says after a pass what was found.

    `paths`: the module of each node.
    """

    device: torch.device
    watch: Stopwatch
    paths: Mapping[str, str]
    tried: dict[str, ProfiledGroups] = field(default_factory=dict)
    same: dict[str, list[Group]] = field(default_factory=dict)
    """By form."""

    def __call__(self, group: Group, made: Function) -> Function:
        self.same.setdefault(group.form, []).append(group)

        def run(*given: Tensor) -> Any:
            if group.form not in self.tried:
                self.tried[group.form] = self._try(group, made, given)
            return (made if self.tried[group.form].compiled else group.module)(*given)

        return run

    def _try(self, group: Group, made: Function, given: Sequence[Tensor]) -> ProfiledGroups:
        leaves = [each.detach().requires_grad_(each.requires_grad) for each in given]
        same = self.same[group.form]
        trial = _Turns(self.device, self.watch, leaves)
        seconds = trial.seconds({"eager": group.module, "compiled": made})
        eager, compiled = seconds["eager"], seconds.get("compiled")
        return ProfiledGroups(
            module=_common(self.paths.get(name, "") for name in group.nodes),
            groups=len(same),
            nodes=tuple(name for each in same for name in each.nodes),
            eager_seconds=eager,
            compiled_seconds=compiled,
            compile_seconds=trial.compile_seconds,
            eager_saved_bytes=trial.saved_bytes(group.module),
            compiled_saved_bytes=None if compiled is None else trial.saved_bytes(made),
            compiled=compiled is not None and compiled < WORTH_COMPILING * eager,
        )


@dataclass
class _Turns:
    """Forward and backward passes of a group on the same tensors."""

    device: torch.device
    watch: Stopwatch
    leaves: Sequence[Tensor]
    compile_seconds: float | None = None

    def __post_init__(self) -> None:
        self.random = RandomGradients(self.device)
        self.wanted = [leaf for leaf in self.leaves if leaf.requires_grad]

    def _fork(self) -> AbstractContextManager[None]:
        """Restores what the state of the random numbers was, which groups draw from."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])

    def seconds(self, ways: Mapping[str, Function]) -> Mapping[str, float]:
        """Returns the medians of turns; without "compiled" if that fails, or its gradients are
        wrong.
        """
        with self._fork():
            if not self._compiles(ways):
                ways = {"eager": ways["eager"]}
            turns = list(self._in_turns(list(ways.values())))
        return dict(zip(ways, map(statistics.median, zip(*turns, strict=True)), strict=True))

    def _compiles(self, ways: Mapping[str, Function]) -> bool:
        began = time.perf_counter()
        try:
            found = self._gradients(ways["compiled"])
        except TorchDynamoException:
            return False
        self.compile_seconds = time.perf_counter() - began
        return furthest_off(self._gradients(ways["eager"]), found) is None

    def _in_turns(self, ways: Sequence[Function]) -> Iterator[list[float]]:
        least, most = _TURNS
        began = time.perf_counter()
        for number in range(most + 1):
            turn = [self._turn(way) for way in ways]
            if number:  # caches and kernels were those of another group
                yield turn
            if number >= least and time.perf_counter() - began > _SECONDS:
                break

    def _turn(self, way: Function) -> float:
        self.watch.clear()
        self.watch.lead()
        marks = [self.watch.mark()]
        ends = [end for end in way(*self.leaves) if end.requires_grad]
        marks.append(self.watch.mark())
        drawn = [self.random.like(end) for end in ends]
        marks.append(self.watch.mark())
        if ends and self.wanted:
            torch.autograd.grad(ends, self.wanted, drawn, allow_unused=True)
        marks.append(self.watch.mark())
        return self.watch.seconds(*marks[:2]) + self.watch.seconds(*marks[2:])

    def _gradients(self, way: Function) -> dict[str, Tensor]:
        torch.manual_seed(0)  # of what is drawn
        leaves = {str(number): leaf for number, leaf in enumerate(self.leaves)}
        return gradients_of(way(*self.leaves), leaves)

    def saved_bytes(self, way: Function) -> int:
        """Returns what a forward pass keeps that was not there before."""
        given = set(map(address, self.leaves))
        with self._fork(), saving() as saved:
            way(*self.leaves)
        return sum(size for place, size in saved.items() if place not in given)


def _common(paths: Iterable[str]) -> str:
    """Returns the module that all are parts of; empty for the model."""
    levels = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(first for first, *_ in takewhile(lambda level: len(set(level)) == 1, levels))

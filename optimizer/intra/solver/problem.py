"""What there is to choose: a label of each variable, at the least seconds within a limit of bytes.

A variable is an operator, or something that the graph is given; its labels are its strategies on
all axes of the mesh at once. A value couples the variable that gives it with those that read it: it
is moved once for each placement in which they want it, however many do. So the cost of a value is
no sum over pairs of variables, but over the groups of readers that agree.

    value x, given as g:    readers want p, p, q    seconds[g, p] + seconds[g, q]

Of a value that a backward pass reads, a device keeps the form in which it reads it, if the forward
pass has brought it there, else the one that was given, to be moved again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

TIE = 1e-9
"""Relative difference below which two sums are equal."""

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Value:
    """`given[label]` of the `source` and `wanted[k][label]` of reader k are numbers of placements;
    `seconds[given, wanted]`: to move it.

    `backward[k]`: whether reader k is in the backward pass. `given_bytes`, `wanted_bytes`: what a
    device keeps of it in each placement; `same[given]`: the wanted placement that this is, else -1.
    `count`: how many equal values it stands for, whose seconds and bytes are added up.
    """

    source: int
    given: Ints
    readers: tuple[int, ...]
    wanted: tuple[Ints, ...]
    seconds: Floats
    backward: tuple[bool, ...]
    given_bytes: Floats
    wanted_bytes: Floats
    same: Ints
    count: int = 1

    def cost(self, given: Ints, wanted: Sequence[Ints]) -> tuple[Floats, Floats]:
        """Seconds and bytes where it is given and wanted so; arrays that broadcast."""
        seconds: Floats = np.zeros(np.broadcast_shapes(*map(np.shape, (given, *wanted))))
        held, source_kept = np.zeros_like(seconds), np.zeros(seconds.shape, dtype=np.bool_)
        whole = self.same[given]
        for k, placement in enumerate(wanted):
            first = ~_any(placement, wanted[:k])
            seconds += np.where(first, self.seconds[given, placement], 0.0)
            if not self.keeps:
                continue
            brought, needed = (_any(placement, self._of(wanted, when)) for when in (False, True))
            kept = first & brought & needed & (placement != whole)
            held += np.where(kept, self.wanted_bytes[placement], 0.0)
            source_kept |= needed & (~brought | (placement == whole))
        return seconds, held + np.where(source_kept, self.given_bytes[given], 0.0)

    def _of(self, wanted: Sequence[Ints], backward: bool) -> list[Ints]:
        """Those of the readers in this pass."""
        pairs = zip(wanted, self.backward, strict=True)
        return [each for each, when in pairs if when == backward]

    @cached_property
    def keeps(self) -> bool:
        """Whether a device keeps something of it for the backward pass."""
        return any(self.backward) and bool(self.given_bytes.any() or self.wanted_bytes.any())

    def restricted(self, alive: Sequence[Ints]) -> Value:
        """The same for these labels of each variable."""
        members = (self.source, *self.readers)
        given, *wanted = (
            own[alive[v]] for v, own in zip(members, (self.given, *self.wanted), strict=True)
        )
        return replace(self, given=given, wanted=tuple(wanted))


def _any(placement: Ints, others: Sequence[Ints]) -> NDArray[np.bool_]:
    """Whether one of the others is this placement; arrays that broadcast."""
    alike = (placement == other for other in others)
    return reduce(np.logical_or, alike, np.zeros(np.shape(placement), dtype=np.bool_))


class Amounts(NamedTuple):
    """What a choice takes."""

    seconds: float
    bytes: float


@dataclass(frozen=True, eq=False)
class Problem:
    """`seconds[variable][label]` and `bytes[variable][label]`; infinite seconds rule a label out.
    `limit`: of all bytes; None for none. `kinds`: the same for variables that stand for equal
    operators, with the same labels in the same order; empty if all differ.
    """

    seconds: Sequence[Floats]
    bytes: Sequence[Floats]
    values: Sequence[Value]
    limit: float | None = None
    kinds: Sequence[Hashable] = ()

    def __post_init__(self) -> None:
        assert len(self.seconds) == len(self.bytes)
        assert all(len(set(v.readers)) == len(v.readers) for v in self.values), "one slot each"
        assert all(v.source not in v.readers for v in self.values)

    def amounts(self, labels: Ints) -> Amounts:
        """The seconds and bytes of these labels, one of each variable."""
        seconds = [float(own[label]) for own, label in zip(self.seconds, labels, strict=True)]
        held = [float(own[label]) for own, label in zip(self.bytes, labels, strict=True)]
        for value in self.values:
            wanted = [
                own[labels[reader]] for reader, own in zip(value.readers, value.wanted, strict=True)
            ]
            given = value.given[labels[value.source]]
            if len(wanted) == 1 and not value.keeps:  # as most: without arrays of one element each
                seconds.append(float(value.seconds[given, wanted[0]]))
                continue
            moved, kept = value.cost(given, wanted)
            seconds.append(float(moved))
            held.append(float(kept))
        return Amounts(sum(seconds), sum(held))

    def restricted(self, alive: Sequence[Ints]) -> Problem:
        """The same variables with these of their labels, at least one of each."""
        assert all(len(own) for own in alive)
        return Problem(
            [own[labels] for own, labels in zip(self.seconds, alive, strict=True)],
            [own[labels] for own, labels in zip(self.bytes, alive, strict=True)],
            [value.restricted(alive) for value in self.values],
            self.limit,
            self.kinds,
        )


def expanded(left: Sequence[Ints], labels: Ints) -> Ints:
    """Labels by their numbers before, of a problem `restricted` to those that are left."""
    return np.array([own[label] for own, label in zip(left, labels, strict=True)], dtype=np.intp)

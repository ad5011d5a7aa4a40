"""Components of different kinds: what those that a stage takes can do together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod
from operator import mul
from typing import NamedTuple

from pipedream.graph.cluster import Cluster


class Grade(NamedTuple):
    """What a stage may count on: the speed of the slowest device it has, relative to the one that
    the profile was measured on, and the bytes of the smallest.
    """

    speed: float
    memory: float


@dataclass(frozen=True)
class Kinds:
    """The components of the outermost level, by kind.

    `machines[k]` are those of kind k, `each[k]` what their devices can do. Components of a kind are
    as good as each other, so what matters of those that a stage takes is how many of each kind.
    """

    machines: tuple[tuple[int, ...], ...]
    each: tuple[Grade, ...]

    @staticmethod
    def of(cluster: Cluster, memory: float | None = None) -> Kinds:
        """`memory`: bytes that may be used of each device, whatever it has."""
        grades = []
        for machine in range(cluster.machines[-1]):
            kind = cluster.kind(machine)
            limit = min(inf if limit is None else limit for limit in (kind.memory, memory))
            grades.append(Grade(kind.speed, limit))
        return Kinds.graded(grades)

    @staticmethod
    def graded(grades: Iterable[Grade]) -> Kinds:
        """Of components 0, 1, ... with devices of these grades."""
        found: dict[Grade, list[int]] = {}
        for machine, grade in enumerate(grades):
            found.setdefault(grade, []).append(machine)
        return Kinds(tuple(map(tuple, found.values())), tuple(found))

    @staticmethod
    def alike(count: int) -> Kinds:
        """So many components of devices like the one that was profiled."""
        return Kinds.graded([Grade(1.0, inf)] * count)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many components there are of each kind."""
        return tuple(map(len, self.machines))

    def grade(self, taken: Sequence[int]) -> Grade:
        """Of a stage that takes so many components of each kind: minibatches are dealt out evenly,
        so the slowest sets the pace.
        """
        grades = [grade for count, grade in zip(taken, self.each, strict=True) if count]
        return Grade(min(grade.speed for grade in grades), min(grade.memory for grade in grades))

    def of_machines(self, machines: Iterable[int]) -> Grade:
        """Of a stage that has these components."""
        taken = set(machines)
        return self.grade([len(taken.intersection(kind)) for kind in self.machines])

    @property
    def limited(self) -> bool:
        """Whether any device has less memory than a plan may take."""
        return any(grade.memory < inf for grade in self.each)

    @property
    def unlimited(self) -> Kinds:
        """The same with as much memory as it takes."""
        speed = {
            machine: grade.speed
            for machines, grade in zip(self.machines, self.each, strict=True)
            for machine in machines
        }
        return Kinds.graded(Grade(speed[machine], inf) for machine in sorted(speed))

    @property
    def least(self) -> float:
        """The bytes of the smallest device."""
        return min(grade.memory for grade in self.each)

    @property
    def fastest(self) -> float:
        return max(grade.speed for grade in self.each)

    @property
    def grades(self) -> tuple[Grade, ...]:
        """Every grade that some stage has."""
        some = product((0, 1), repeat=len(self.each))
        return tuple(sorted({self.grade(taken) for taken in some if any(taken)}))


class Tally:
    """How many components of each kind, as one number: the counts are its digits.

    Where there is one kind the number is the count. What two hold together is their sum.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self.size = prod(n + 1 for n in counts)
        self._worth = tuple(prod(n + 1 for n in counts[k + 1 :]) for k in range(len(counts)))

    def number(self, held: Sequence[int]) -> int:
        return sum(map(mul, held, self._worth))

    def held(self, number: int) -> tuple[int, ...]:
        """How many components of each kind."""
        digits = zip(self.counts, self._worth, strict=True)
        return tuple(number // worth % (most + 1) for most, worth in digits)

    def total(self, number: int) -> int:
        """How many components of any kind."""
        return sum(self.held(number))

    def takings(self) -> Iterator[tuple[int, ...]]:
        """Every number of components of each kind that may be taken, one at least."""
        every = product(*(range(n + 1) for n in self.counts))
        next(every)
        return every

    def besides(self, taken: Sequence[int]) -> Sequence[int]:
        """The numbers of all that may be had beside those taken, the most last."""
        left = [n - t for n, t in zip(self.counts, taken, strict=True)]
        if len(left) == 1:
            return range(left[0] + 1)
        return [self.number(held) for held in product(*(range(n + 1) for n in left))]

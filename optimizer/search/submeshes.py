"""Submeshes: the parts of a cluster that a stage of a flat pipeline may use (Alpa, OSDI 2022,
section 5).

A submesh is some devices of one machine, or some whole machines of one component of the next level,
and so on outwards: Alpa's (1, 1) to (1, M) and (2, M) to (N, M), for any number of levels. The
stages of a pipeline fill the cluster in the order of its devices, so a submesh is two numbers:
where it begins, and its size. Machines of several types may be filled in any order (fill_order.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from pipedream.optimizer.cost.stages import NestedStage, Share


class Submesh(NamedTuple):
    """`size` devices from number `begin` on; for `boundary_level` see `Mesh`."""

    begin: int
    size: int
    boundary_level: int


class Mesh:
    """The devices of a cluster with these counts of `machines` per level, innermost first."""

    def __init__(self, machines: Sequence[int]) -> None:
        self.machines = tuple(machines)
        self.within = tuple(prod(machines[:level]) for level in range(len(machines) + 1))

    @property
    def devices(self) -> int:
        return self.within[-1]

    def boundary_level(self, begin: int) -> int:
        """The level (1 innermost) whose link joins a stage from `begin` on to the stage before it;
        0 for the first stage of the pipeline.
        """
        levels = range(1, len(self.within))
        return next((level for level in levels if begin % self.within[level]), 0)

    def submeshes(self, begin: int, straight: bool = False) -> Iterator[Submesh]:
        """All submeshes that begin at this device; with `straight` only that of one device."""
        boundary_level = self.boundary_level(begin)
        yield Submesh(begin, 1, boundary_level)
        for level, count in enumerate(self.machines):
            if straight or begin % self.within[level]:
                return
            taken = begin // self.within[level] % count
            for replicas in range(2, count - taken + 1):
                yield Submesh(begin, replicas * self.within[level], boundary_level)

    def shape(self, size: int) -> tuple[int, ...]:
        """The number of components of each level in a submesh of this size, innermost first."""
        return tuple(
            max(1, min(size // self.within[level], count))
            for level, count in enumerate(self.machines)
        )

    def spans(self, size: int) -> int:
        """The outermost level of which a submesh of this size has several components, 0 if none."""
        shape = self.shape(size)
        return max((level for level, count in enumerate(shape, start=1) if count > 1), default=0)


def nested_stage(
    mesh: Mesh, start: int, end: int, submesh: Submesh, order: Sequence[int] = ()
) -> NestedStage:
    """The stage between two cuts as a share of every level, each with the stage's own cuts.

    `order` lists the components of the outermost level in the order in which they are filled
    [default: by number].
    """
    shape, outermost = mesh.shape(submesh.size), len(mesh.machines)
    shares = []
    for level, replicas in enumerate(shape, start=1):
        offset = submesh.begin // mesh.within[level - 1] % mesh.machines[level - 1]
        chosen = tuple(order[offset : offset + replicas]) if level == outermost else ()
        first = level != submesh.boundary_level
        shares.append(Share(level, start, end, offset, replicas, first, chosen))
    return NestedStage(tuple(shares))

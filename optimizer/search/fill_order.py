"""How the stages of one flat pipeline may follow each other over the machines of a cluster.

The machines, components of the outermost level, are filled one after another: of machines of one
kind (kinds.py) it does not matter which comes first, so that how far a pipeline has come is how
many of each kind are full, and how much of the one that was begun last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from operator import sub
from typing import NamedTuple

import numpy as np

from pipedream.optimizer.cost.device_types import Grade, Kinds, Tally
from pipedream.optimizer.cuts.planning_graph import Floats, Ints
from pipedream.optimizer.search.hierarchical import Rules
from pipedream.optimizer.search.submeshes import Mesh, Submesh

_NONE = -1


class StageKind(NamedTuple):
    """All that the cost of a stage depends on beside its cuts."""

    entry: int
    spans: int  # the level whose components it has several of; 0 for one device
    size: int
    load: int
    grade: Grade


class Spot(NamedTuple):
    """Where stages begin or have ended.

    `full`: the machines (their `Tally`) that are behind it; `inside`: devices of one more machine,
    of this `kind`, if one is begun; `workers` from there on (0 where not counted).
    """

    full: int
    kind: int = _NONE
    inside: int = 0
    workers: int = 0


@dataclass(frozen=True)
class Moves:
    """`machines` of each kind; `kinds` of stages; `spots`, by the number of devices before them,
    and `power`, what these devices do together.

    Stages of kind k lead from spots `source[first[k] : first[k + 1]]` to `target[...]`, ordered by
    the power before the source. Those from spot s are, once more, `kind_from[first_from[s] :
    first_from[s + 1]]`, to `target_from[...]`. The pipeline may end at a spot where `may_end`, and
    leave devices out from spot s to any of `skips[s]`, which is padded with s.
    """

    mesh: Mesh
    machines: tuple[tuple[int, ...], ...]
    kinds: tuple[StageKind, ...]
    spots: tuple[Spot, ...]
    power: Floats
    first: Ints
    source: Ints
    target: Ints
    first_from: Ints
    kind_from: Ints
    target_from: Ints
    may_end: Ints
    skips: Ints
    tally: Tally

    @property
    def whole_power(self) -> float:
        return float(self.power[-1])

    def begun(self, spot: Spot) -> tuple[int, ...]:
        """How many machines of each kind it has behind it or is in."""
        held = list(self.tally.held(spot.full))
        if spot.inside:
            held[spot.kind] += 1
        return tuple(held)

    def submesh(self, source: int, kind: int) -> Submesh:
        """Of a stage, its devices numbered in the order in which machines are filled."""
        begin = _position(self.mesh, self.tally, self.spots[source])
        return Submesh(begin, self.kinds[kind].size, self.kinds[kind].entry)

    def newly_begun(self, source: int, target: int) -> tuple[int, ...]:
        """How many machines of each kind a stage is the first on."""
        return tuple(map(sub, self.begun(self.spots[target]), self.begun(self.spots[source])))


def moves(machines: Sequence[int], kinds: Kinds, rules: Rules, with_load: bool) -> Moves:
    """`with_load`: what a stage costs depends on the workers behind it."""
    return _Maker(Mesh(machines), kinds, rules, with_load).moves()


def _position(mesh: Mesh, tally: Tally, spot: Spot) -> int:
    return tally.total(spot.full) * mesh.within[-2] + spot.inside


class _Maker:
    def __init__(self, mesh: Mesh, kinds: Kinds, rules: Rules, with_load: bool) -> None:
        self.mesh, self.kinds, self.rules, self.with_load = mesh, kinds, rules, with_load
        self.counted = with_load and rules.fewer_machines
        self.tally = Tally(kinds.counts)
        self.inner = mesh.within[-2]
        self.one = [
            self.tally.number([int(kind == other) for other in range(len(kinds.counts))])
            for kind in range(len(kinds.counts))
        ]
        self.spots = sorted(self._all_spots(), key=self._position)
        self.number = {spot: number for number, spot in enumerate(self.spots)}

    def moves(self) -> Moves:
        power = np.array([self._power(spot) for spot in self.spots])
        found: dict[StageKind, list[tuple[int, int]]] = {}
        for source, spot in enumerate(self.spots):
            for kind, target in self._from(spot):
                found.setdefault(kind, []).append((source, target))
        kinds = tuple(sorted(found))
        pairs = np.array(
            [
                pair
                for kind in kinds
                for pair in sorted(found[kind], key=lambda pair: (power[pair[0]], pair))
            ],
            dtype=np.intp,
        ).reshape(-1, 2)
        first = np.cumsum([0, *(len(found[kind]) for kind in kinds)], dtype=np.intp)
        of_kind = np.repeat(np.arange(len(kinds)), np.diff(first))
        by_source = np.argsort(pairs[:, 0], kind="stable")
        spots = np.arange(len(self.spots) + 1)
        skips = [list(self._skips(spot)) for spot in self.spots]
        width = max(map(len, skips))
        padded = [row + [spot] * (width - len(row)) for spot, row in enumerate(skips)]
        ends = [number for number, spot in enumerate(self.spots) if self._may_end(spot)]
        return Moves(
            mesh=self.mesh,
            machines=self.kinds.machines,
            kinds=kinds,
            spots=tuple(self.spots),
            power=power,
            first=first,
            source=np.ascontiguousarray(pairs[:, 0]),
            target=np.ascontiguousarray(pairs[:, 1]),
            first_from=np.searchsorted(pairs[by_source, 0], spots),
            kind_from=of_kind[by_source],
            target_from=pairs[by_source, 1],
            may_end=np.array(ends, dtype=np.intp),
            skips=np.array(padded, dtype=np.intp).reshape(len(self.spots), width),
            tally=self.tally,
        )

    def _position(self, spot: Spot) -> int:
        return _position(self.mesh, self.tally, spot)

    def _power(self, spot: Spot) -> float:
        held = zip(self.tally.held(spot.full), self.kinds.each, strict=True)
        full = sum(count * grade.speed for count, grade in held) * self.inner
        return full + (self.kinds.each[spot.kind].speed * spot.inside if spot.inside else 0.0)

    def _all_spots(self) -> Iterator[Spot]:
        for full in range(self.tally.size):
            yield from self._with_workers(Spot(full))
            for kind in self._left(full):
                for inside in range(1, self.inner):
                    yield from self._with_workers(Spot(full, kind, inside))

    def _with_workers(self, spot: Spot) -> Iterator[Spot]:
        most = self.mesh.devices - self._position(spot) if self.counted else 0
        return (spot._replace(workers=workers) for workers in range(most + 1))

    def _left(self, full: int) -> list[int]:
        """The kinds that there is a machine of besides."""
        held = zip(self.tally.held(full), self.kinds.counts, strict=True)
        return [kind for kind, (taken, count) in enumerate(held) if taken < count]

    def _from(self, spot: Spot) -> Iterator[tuple[StageKind, int]]:
        """The stages that may begin here, and where they end."""
        position = self._position(spot)
        if position == self.mesh.devices:
            return
        for submesh in self.mesh.submeshes(position, self.rules.straight):
            workers = spot.workers - submesh.size if self.counted else 0
            if workers < 0:
                continue
            behind = workers if self.counted else self.mesh.devices - position - submesh.size
            load = ceil(behind / submesh.size) if self.with_load else 0
            spans = self.mesh.spans(submesh.size)
            for grade, target in self._taking(spot, submesh.size):
                kind = StageKind(submesh.entry, spans, submesh.size, load, grade)
                yield kind, self.number[target._replace(workers=workers)]

    def _taking(self, spot: Spot, size: int) -> Iterator[tuple[Grade, Spot]]:
        """Every choice of machines for a stage of so many devices."""
        if size < self.inner:
            for kind in [spot.kind] if spot.inside else self._left(spot.full):
                yield self.kinds.each[kind], self._further(spot._replace(kind=kind), size)
            return
        held = self.tally.held(spot.full)
        for taken in self.tally.takings():
            left = zip(held, taken, self.kinds.counts, strict=True)
            if sum(taken) == size // self.inner and all(h + t <= most for h, t, most in left):
                yield self.kinds.grade(taken), Spot(spot.full + self.tally.number(taken))

    def _further(self, spot: Spot, devices: int) -> Spot:
        """So many devices on, within the machine of `spot.kind`."""
        inside = spot.inside + devices
        if inside == self.inner:
            return spot._replace(full=spot.full + self.one[spot.kind], kind=_NONE, inside=0)
        return spot._replace(inside=inside)

    def _skips(self, spot: Spot) -> Iterator[int]:
        """The next spots that a stage may begin at if devices are left out here."""
        if self.rules.fewer_machines and spot.inside:
            position = self._position(spot)
            ends = {-(-position // size) * size for size in self.mesh.within[:-1]} - {position}
            for end in sorted(ends):
                further = self._further(spot, end - position)
                if further in self.number:
                    yield self.number[further]

    def _may_end(self, spot: Spot) -> bool:
        if self.rules.fewer_machines:
            return spot.workers == 0
        return self._position(spot) == self.mesh.devices

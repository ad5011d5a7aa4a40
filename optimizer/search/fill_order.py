"""The fill order: how the stages of one flat pipeline may follow each other over a cluster (Alpa,
OSDI 2022, section 5).

Each stage is on a submesh: some devices of one machine, or some whole machines of one component of
the next level, and so on outwards: Alpa's (1, 1) to (1, M) and (2, M) to (N, M), for any number of
levels. The stages fill the cluster in the order of its devices, so a submesh is two numbers: where
it begins, and its size.

The machines, components of the outermost level, are filled one after another. Machines of one type
are interchangeable, so the state of a pipeline is the number of full machines of each type and how
much of the machine begun last is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from operator import sub
from typing import NamedTuple

import numpy as np

from pipedream.optimizer.cost.device_types import DeviceTypes, MixedRadixCounter, WorstDevice
from pipedream.optimizer.cost.stages import NestedStage, Rules, Share
from pipedream.optimizer.cuts.planning_graph import Floats, Ints

_NONE = -1


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


class StageVariant(NamedTuple):
    """All that the cost of a stage depends on besides its cuts."""

    boundary_level: int  # see `Mesh.boundary_level`
    spans: int  # the outermost level of which it has several components; 0 for one device
    size: int
    downstream_workers: int
    device: WorstDevice


class FillState(NamedTuple):
    """How far the cluster is filled: the boundary between two stages.

    `full` encodes the machines that are filled (`MixedRadixCounter`); `inside` counts the devices
    used of one more machine, of type `device_type`, if one is begun. `workers` counts those that
    follow (0 if not counted).
    """

    full: int
    device_type: int = _NONE
    inside: int = 0
    workers: int = 0


@dataclass(frozen=True)
class FillOrder:
    """The graph of fill states, with an edge for every stage that may lead from one to another.

    `machines` of each type; `variants` of stages; `states` ordered by the number of devices before
    them; `capacity[s]`: the total speed of these devices.

    Stages of variant k lead from states `source[first[k] : first[k + 1]]` to `target[...]`, ordered
    by the capacity before the source. The same edges by source: those from state s are
    `variant_from[first_from[s] : first_from[s + 1]]`, leading to `target_from[...]`. A pipeline may
    end in the states `may_end`, and leave devices out from state s to any of `skips[s]`, padded
    with s.
    """

    mesh: Mesh
    machines: tuple[tuple[int, ...], ...]
    variants: tuple[StageVariant, ...]
    states: tuple[FillState, ...]
    capacity: Floats
    first: Ints
    source: Ints
    target: Ints
    first_from: Ints
    variant_from: Ints
    target_from: Ints
    may_end: Ints
    skips: Ints
    counter: MixedRadixCounter

    def begun(self, state: FillState) -> tuple[int, ...]:
        """The machines of each type that are full or begun."""
        taken = list(self.counter.decode(state.full))
        if state.inside:
            taken[state.device_type] += 1
        return tuple(taken)

    def submesh(self, source: int, variant: int) -> Submesh:
        """The devices of a stage, numbered in the order in which machines are filled."""
        begin = _position(self.mesh, self.counter, self.states[source])
        return Submesh(begin, self.variants[variant].size, self.variants[variant].boundary_level)

    def newly_begun(self, source: int, target: int) -> tuple[int, ...]:
        """The machines of each type that this stage begins."""
        return tuple(map(sub, self.begun(self.states[target]), self.begun(self.states[source])))


@lru_cache(maxsize=64)  # memory limits and several searches ask for the same one again
def build_fill_order(
    machines: tuple[int, ...], types: DeviceTypes, rules: Rules, with_downstream: bool
) -> FillOrder:
    """The fill order; `with_downstream`: costs depend on the workers behind a stage."""
    return _FillOrderBuilder(Mesh(machines), types, rules, with_downstream).build()


def _position(mesh: Mesh, counter: MixedRadixCounter, state: FillState) -> int:
    return counter.total(state.full) * mesh.within[-2] + state.inside


class _FillOrderBuilder:
    def __init__(self, mesh: Mesh, types: DeviceTypes, rules: Rules, with_downstream: bool) -> None:
        self.mesh, self.types, self.rules = mesh, types, rules
        self.with_downstream = with_downstream
        self.counted = with_downstream and rules.fewer_machines
        self.counter = MixedRadixCounter(types.counts)
        self.inner = mesh.within[-2]
        self.one = [
            self.counter.encode([int(device_type == other) for other in range(len(types.counts))])
            for device_type in range(len(types.counts))
        ]
        self.states = sorted(self._all_states(), key=self._position)
        self.number = {state: number for number, state in enumerate(self.states)}

    def build(self) -> FillOrder:
        capacity = np.array([self._capacity(state) for state in self.states])
        # An edge (s, s') of variant k for every stage of k that takes the devices from s to s':
        # the recurrence of latency.py is F(c, s) = min over edges and cuts c' of t + F(c', s').
        pairs_of: dict[StageVariant, list[tuple[int, int]]] = {}
        for source, state in enumerate(self.states):
            for variant, target in self._from(state):
                pairs_of.setdefault(variant, []).append((source, target))
        variants = tuple(sorted(pairs_of))
        by_capacity = (
            pair
            for variant in variants
            for pair in sorted(pairs_of[variant], key=lambda pair: (capacity[pair[0]], pair))
        )
        pairs = np.array(list(by_capacity), dtype=np.intp).reshape(-1, 2)
        first = np.cumsum([0, *(len(pairs_of[variant]) for variant in variants)], dtype=np.intp)
        of_variant = np.repeat(np.arange(len(variants)), np.diff(first))
        by_source = np.argsort(pairs[:, 0], kind="stable")
        states = np.arange(len(self.states) + 1)
        skips = [list(self._skips(state)) for state in self.states]
        width = max(map(len, skips))
        padded = [row + [state] * (width - len(row)) for state, row in enumerate(skips)]
        ends = [number for number, state in enumerate(self.states) if self._may_end(state)]
        return FillOrder(
            mesh=self.mesh,
            machines=self.types.machines,
            variants=variants,
            states=tuple(self.states),
            capacity=capacity,
            first=first,
            source=np.ascontiguousarray(pairs[:, 0]),
            target=np.ascontiguousarray(pairs[:, 1]),
            first_from=np.searchsorted(pairs[by_source, 0], states),
            variant_from=of_variant[by_source],
            target_from=pairs[by_source, 1],
            may_end=np.array(ends, dtype=np.intp),
            skips=np.array(padded, dtype=np.intp).reshape(len(self.states), width),
            counter=self.counter,
        )

    def _position(self, state: FillState) -> int:
        return _position(self.mesh, self.counter, state)

    def _capacity(self, state: FillState) -> float:
        full_machines = zip(self.counter.decode(state.full), self.types.worst, strict=True)
        full: float = sum(count * device.speed for count, device in full_machines) * self.inner
        begun = self.types.worst[state.device_type].speed if state.inside else 0.0
        return full + begun * state.inside

    def _all_states(self) -> Iterator[FillState]:
        for full in range(self.counter.size):
            yield from self._with_workers(FillState(full))
            for device_type in self._left(full):
                for inside in range(1, self.inner):
                    yield from self._with_workers(FillState(full, device_type, inside))

    def _with_workers(self, state: FillState) -> Iterator[FillState]:
        most = self.mesh.devices - self._position(state) if self.counted else 0
        return (state._replace(workers=workers) for workers in range(most + 1))

    def _left(self, full: int) -> list[int]:
        """The types with a machine left."""
        filled = zip(self.counter.decode(full), self.types.counts, strict=True)
        return [device_type for device_type, (taken, count) in enumerate(filled) if taken < count]

    def _from(self, state: FillState) -> Iterator[tuple[StageVariant, int]]:
        """The stages that may begin in this state, and the states they end in."""
        position = self._position(state)
        if position == self.mesh.devices:
            return
        for submesh in self.mesh.submeshes(position, self.rules.straight):
            workers = state.workers - submesh.size if self.counted else 0
            if workers < 0:
                continue
            behind = workers if self.counted else self.mesh.devices - position - submesh.size
            downstream_workers = ceil(behind / submesh.size) if self.with_downstream else 0
            spans = self.mesh.spans(submesh.size)
            for device, target in self._taking(state, submesh.size):
                shape = submesh.boundary_level, spans, submesh.size, downstream_workers
                yield StageVariant(*shape, device), self.number[target._replace(workers=workers)]

    def _taking(self, state: FillState, size: int) -> Iterator[tuple[WorstDevice, FillState]]:
        """Every choice of machines for a stage of `size` devices."""
        if size < self.inner:
            for device_type in [state.device_type] if state.inside else self._left(state.full):
                further = self._further(state._replace(device_type=device_type), size)
                yield self.types.worst[device_type], further
            return
        filled = self.counter.decode(state.full)
        for taken in self.counter.choices():
            left = zip(filled, taken, self.types.counts, strict=True)
            if sum(taken) == size // self.inner and all(h + t <= most for h, t, most in left):
                yield self.types.worst_of(taken), FillState(state.full + self.counter.encode(taken))

    def _further(self, state: FillState, devices: int) -> FillState:
        """The state `devices` further on, within the machine of type `state.device_type`."""
        inside = state.inside + devices
        if inside == self.inner:
            return FillState(state.full + self.one[state.device_type], workers=state.workers)
        return state._replace(inside=inside)

    def _skips(self, state: FillState) -> Iterator[int]:
        """The next states in which a stage may begin if devices are left out here."""
        if self.rules.fewer_machines and state.inside:
            position = self._position(state)
            ends = {-(-position // size) * size for size in self.mesh.within[:-1]} - {position}
            for end in sorted(ends):
                further = self._further(state, end - position)
                if further in self.number:
                    yield self.number[further]

    def _may_end(self, state: FillState) -> bool:
        if self.rules.fewer_machines:
            return state.workers == 0
        return self._position(state) == self.mesh.devices

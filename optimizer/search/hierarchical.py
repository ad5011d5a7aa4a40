"""The hierarchical dynamic program: the best pipeline of pipelines over nested downsets.

PipeDream, SOSP 2019, section 3.1, from the innermost level outwards: level
k divides a piece of the model into stages, each replicated over some components of level k - 1, so
that the cost of a stage rests on the best pipeline *inside* one component. Level 0 is a device.

    A_k(i -> j, m) = min over cuts i < c <= j, replicas r of max(T_k(i -> c, r), A_k(c -> j, m - r))
    T_k(i -> c, r) = price of level k for r replicas, given A_(k-1)(i -> c, all components inside)

Differences from the source:

- only pairs of nested downsets are tried, so that no stage is ever negative;
- pipelines grow from their end, so that the workers behind a stage, and with them its minibatches
  in flight and its memory, are known when it is added. A component's inner pipeline needs one
  number of what is behind it: the workers of later stages per component, `downstream_workers`. It
  may be rounded up at each level, since ceil((n + x) / a) = ceil((n + ceil(x)) / a) for integers n
  and a;
- components of the outermost level may be of several types (cost/device_types.py): the state counts
  the components of each type, and inner pipelines are planned for each `WorstDevice`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, prod
from operator import mul
from typing import NamedTuple

import numpy as np
from numba import njit

from pipedream.optimizer.cost.device_types import DeviceTypes, MixedRadixCounter, WorstDevice
from pipedream.optimizer.cost.stage_cost import LevelShare, StageCost
from pipedream.optimizer.cost.stages import TIE, CutFamily, NestedStage, Rules, Share, Solution
from pipedream.optimizer.cuts.downsets import States
from pipedream.optimizer.cuts.planning_graph import Floats, Ints

# Elementary steps of the outermost and of the inner levels in about half a minute.
_OUTER_BUDGET, _INNER_BUDGET = 4e9, 3e11


class _Subproblem(NamedTuple):
    """Planning inside one component of `level` whose worst device is `device`, with this many
    workers of later stages per component, rounded up. `replicas`: so many components do the same,
    if the cost depends on that; else 1.
    """

    level: int
    downstream_workers: int
    device: WorstDevice
    replicas: int = 1


class _Remaining(NamedTuple):
    """The components (a `MixedRadixCounter` code) and devices (0 if not counted) of a pipeline."""

    components: int
    devices: int


class _Allocation(NamedTuple):
    """A stage on `replicas` components and `used` devices of each (0 if not counted).

    `taken`: the components of each type, `code` their `MixedRadixCounter` code, `device` their
    worst device. `behind`: codes of the components that may be left to the stages behind it.
    `downstream[m][w]`: the downstream workers inside each component with `behind[m]` and w devices
    behind it; one row if m makes no difference, one column if devices are not counted.
    """

    replicas: int
    taken: tuple[int, ...]
    code: int
    device: WorstDevice
    used: int
    behind: Sequence[int]
    downstream: list[list[int]]

    def leaves(self, left: _Remaining) -> _Remaining | None:
        """What remains for the stages behind it; None if this stage does not fit."""
        components = left.components - self.code
        devices = left.devices - self.replicas * self.used
        fits = components in self.behind and 0 <= devices < len(self.downstream[0])
        return _Remaining(components, devices) if fits else None

    def at(self, behind: _Remaining) -> tuple[int, int]:
        """The indices of `downstream` for what is behind."""
        return min(self.behind.index(behind.components), len(self.downstream) - 1), behind.devices


class Search:
    """Finds the pipeline whose costliest stage is cheapest; ties go to the fewest stages.

    `device_types` are those of the outermost level's components. Stages and pipelines that cost
    more than `limit` are not explored. If `coarse`, many downstream workers are taken to be a few
    more, and replicas to be fewer, of which there are far fewer numbers: plans that just fit memory
    may be missed.

    Work: N^2 M^2 for N cuts and M machines at the outermost level, N^3 M^2 at each within. With
    M1, M2, ... machines of each type the first is N^2 M1^2 M2^2 ..., the second once for each
    distinct worst device.
    """

    def __init__(
        self,
        cuts: CutFamily,
        machines: Sequence[int],
        cost: StageCost,
        rules: Rules,
        device_types: DeviceTypes,
        limit: float = inf,
        coarse: bool = False,
    ) -> None:
        self.cuts = cuts
        self.coarse = coarse
        self.machines = machines
        self.cost = cost
        self.rules = rules
        self.limit = limit * (1 + TIE)
        self.device_types = device_types
        self.counters = [
            *(MixedRadixCounter((count,)) for count in machines[:-1]),
            MixedRadixCounter(self.device_types.counts),
        ]
        self._on = {device: cost.on(device) for device in device_types.distinct}
        self.devices = tuple(prod(machines[:level]) for level in range(len(machines) + 1))
        # Downstream workers follow from the number of components behind a stage, unless a component
        # may use only some of its devices, from level 2 on; then devices are counted as well.
        self._counted = cost.depends_on_downstream and rules.fewer_machines
        self.steps = 0  # elementary steps of work done
        self._tables: dict[_Subproblem, Floats] = {}
        self._known: dict[tuple[_Subproblem, int], Floats] = {}
        self._allocated: dict[tuple[_Subproblem, bool], list[_Allocation]] = {}

    def best(self) -> Solution | None:
        """The best pipeline; None if there is none."""
        costs = self._costs()
        used = int(costs.argmin())
        cost, subproblem, piece = float(costs[used]), self._outermost, (0, len(self.cuts) - 1)
        if cost == inf:
            return None
        return Solution(cost, tuple(self._unfold(subproblem, piece, used, cost)))

    def bottleneck(self) -> float:
        """The cost of the best pipeline; infinite if there is none."""
        return float(self._costs().min())

    @property
    def _outermost(self) -> _Subproblem:
        return _Subproblem(len(self.machines), 0, self.device_types.worst[0])

    def _costs(self) -> Floats:
        """[used]: the best pipelines of the whole model."""
        whole = self._pipelines(self._outermost, (0, len(self.cuts) - 1))[1]
        return self._by_devices(self._outermost, whole)[:, 0, 0]

    def _inside(self, subproblem: _Subproblem, start: int, ends: States) -> Floats:
        """[used, end]: the best cost in this subproblem of the pieces that begin at `start`."""
        if subproblem.level == 0:
            if self.coarse:
                return self._on_device(subproblem, start)[None, ends]
            cost = self._on[subproblem.device]
            given = subproblem.downstream_workers, subproblem.replicas
            return cost.on_device(start, ends, *given)[None]
        if subproblem not in self._tables:
            self._tables[subproblem] = self._by_devices(subproblem, self._pipelines(subproblem)[1])
        return self._tables[subproblem][:, start, ends]

    def _on_device(self, subproblem: _Subproblem, start: int) -> Floats:
        """[end]: the cost on a device, remembered: rounded numbers come again and again."""
        key = subproblem, start
        if key not in self._known:
            given = subproblem.downstream_workers, subproblem.replicas
            cost = self._on[subproblem.device]
            self._known[key] = cost.on_device(start, slice(None), *given)
        return self._known[key]

    def _by_devices(self, subproblem: _Subproblem, whole: Floats) -> Floats:
        """[used, ...]: the best of `whole[m, w, ...]`; of length 1 if devices are not counted.

        At level 1 components are devices.
        """
        return whole[:, 0] if self._counted and subproblem.level == 1 else whole.min(axis=0)

    def _counts(self, level: int) -> bool:
        """Whether pipelines at this level count devices as well as components."""
        return self._counted and level > 1

    def _pipelines(
        self,
        subproblem: _Subproblem,
        piece: tuple[int, int] | None = None,
        within: float | None = None,
    ) -> tuple[Floats, Floats]:
        """The best pipelines of this subproblem, for every piece of the model or only for `piece`.

        Returns `later[m, w, start, end]`, pipelines on m components (a `MixedRadixCounter` code)
        and w devices (0 if not counted) that follow another stage, and `whole`, likewise, pipelines
        that begin at the start of the piece. `end` is the last axis, of length 1 for one piece. The
        entries are costs or, if `within` is given, numbers of stages each costing at most that.
        """
        begin, end = piece or (0, len(self.cuts) - 1)
        ends = range(len(self.cuts)) if piece is None else range(end, end + 1)
        width = self.devices[subproblem.level] + 1 if self._counts(subproblem.level) else 1
        counters = self.counters[subproblem.level - 1].size
        later = np.full((counters, width, len(self.cuts), len(ends)), inf)
        whole = np.full_like(later, inf)
        later[0, 0, ends, range(len(ends))] = 0.0
        reach = np.zeros(later.shape[:3], dtype=np.intp)
        reach[0, 0, ends] = np.arange(len(ends)) + 1
        # A_k(i -> j, m) = min over stops c, replicas r of max(T_k(i -> c, r), A_k(c -> j, m - r)),
        # from the last start i to the first; A_k(j -> j, 0) = 0.
        for start in reversed(range(begin, end)):
            stops = self._stops(subproblem, start, end)
            if piece is not None:
                stops = stops[(later[:, :, stops, 0] < inf).any(axis=(0, 1))]
            if not len(stops):
                continue
            limits = np.full(len(stops), inf)
            if within is None:
                limits = self._limits(subproblem.level, start, stops)
            first_end = stops if piece is None else np.zeros_like(stops)
            for first, table in ((False, later), (True, whole)):
                if first and piece is not None and start != begin:
                    continue
                for allocation, costs in self._options(subproblem, start, stops, first, within):
                    size = allocation.replicas * allocation.used
                    where = np.asarray(allocation.behind), allocation.code, size
                    rest = later, reach, stops, first_end
                    self.steps += _extend(
                        table, start, rest, costs, where, limits, within is not None
                    )
            reach[:, :, start] = _reach(later[:, :, start])
        return later, whole

    def _stops(self, subproblem: _Subproblem, start: int, end: int) -> Ints:
        """The ends of stages from `start` that can stay within the cost limit."""
        stops = np.arange(len(self.cuts))[self.cuts.after(start, end)]
        if self.limit == inf:
            return stops
        # A stage has fewest bytes on each device alone, without buckets, or with most replicas.
        extremes = {1, self.devices[-1]}
        asked = (
            cost.on_device(start, stops, 0, replicas)
            for cost in self._on.values()
            for replicas in extremes
        )
        alone = np.min(list(asked), axis=0)
        shared = alone / self.devices[subproblem.level]  # by all that a stage may have
        within: Ints = stops[shared <= self._limits(subproblem.level, start, stops)]
        return within

    def _limits(self, level: int, start: int, ends: Ints) -> Floats:
        """The most that each of these pieces may cost in a component of `level`.

        Above that no number of such components makes a stage within `limit`: by any cost model a
        stage on m takes at least an m-th of its time on one, and at least its overhead. A part of a
        larger stage may cost no more, since that has more overhead.
        """
        if level == len(self.machines) or self.limit == inf:
            return np.full(len(ends), self.limit)
        outside = self._limits(level + 1, start, ends)
        replicas = np.arange(1, 2 if self.rules.straight else self.machines[level] + 1)[:, None]
        least = self.cost.overhead(start, ends, level + 1, replicas)
        most: Floats = (np.where(least <= outside, replicas, 0) * outside).max(axis=0)
        return most

    def _options(
        self, subproblem: _Subproblem, start: int, after: States, first: bool, within: float | None
    ) -> Iterator[tuple[_Allocation, Floats]]:
        """Every allocation of the stages from `start`, all priced in one question, and its
        cost[m, w, end], with m and w as in its `downstream`.

        With `within` the cost is a number of stages: 1, infinite for a stage that costs more, and
        more than any pipeline has for a stage without work.
        """
        allocations = self._allocations(subproblem, first)
        if not allocations:
            return
        cases = [
            (allocation, self._within(subproblem, allocation, downstream_workers))
            for allocation in allocations
            for row in allocation.downstream
            for downstream_workers in row
        ]
        subproblems = {inside for _, inside in cases}
        below = {inside: self._inside(inside, start, after) for inside in subproblems}
        inner = np.array([below[inside][allocation.used] for allocation, inside in cases])
        replicas = np.array([[allocation.replicas] for allocation, _ in cases])
        share = LevelShare(subproblem.level, start, after, replicas, first)
        cost = self.cost.price(inner, [share])
        if within is not None:
            works = self.cuts.working[after] > self.cuts.working[start]
            cost = np.where(cost <= within, np.where(works, 1.0, len(self.cuts)), inf)
        position = 0
        for allocation in allocations:
            shape = len(allocation.downstream), len(allocation.downstream[0])
            rows = cost[position : position + prod(shape)]
            yield allocation, rows.reshape(*shape, -1)
            position += len(rows)

    def _within(
        self, subproblem: _Subproblem, allocation: _Allocation, downstream_workers: int
    ) -> _Subproblem:
        """Returns planning inside each component of the allocation."""
        replicas = 1
        if self.cost.depends_on_replicas:
            replicas = subproblem.replicas * allocation.replicas
            replicas = _rounded_down(replicas) if self.coarse else replicas
        level = subproblem.level - 1
        return _Subproblem(level, downstream_workers, allocation.device, replicas)

    def _allocations(self, subproblem: _Subproblem, first: bool) -> list[_Allocation]:
        """Every number of components, and of devices in each, for a stage."""
        if (subproblem, first) not in self._allocated:
            self._allocated[subproblem, first] = list(self._new_allocations(subproblem, first))
        return self._allocated[subproblem, first]

    def _new_allocations(self, subproblem: _Subproblem, first: bool) -> Iterator[_Allocation]:
        outermost = subproblem.level == len(self.machines)
        counter = self.counters[subproblem.level - 1]
        inner = self.devices[subproblem.level - 1]
        counts = range(1, inner + 1) if self._counts(subproblem.level) else range(1)
        for taken in counter.choices():
            replicas = sum(taken)
            if self.rules.straight and replicas > 1:
                continue
            behind = counter.remaining_after(taken)
            if not first:  # leave a component to the stage before it
                behind = behind[:-1]
            elif not self.rules.fewer_machines:
                behind = behind[-1:]
            device = self.device_types.worst_of(taken) if outermost else subproblem.device
            downstream = self._downstream(subproblem, replicas, behind) if behind else []
            for used in counts if behind else ():
                yield _Allocation(
                    replicas, taken, counter.encode(taken), device, used, behind, downstream
                )

    def _downstream(
        self, subproblem: _Subproblem, replicas: int, behind: Sequence[int]
    ) -> list[list[int]]:
        if not self.cost.depends_on_downstream:
            return [[0]]
        inner = self.devices[subproblem.level - 1]
        components = list(map(self.counters[subproblem.level - 1].total, behind))

        def each(devices: int) -> int:
            exact = -(-(devices + subproblem.downstream_workers) // replicas)
            return _rounded_up(exact) if self.coarse else exact

        if self._counts(subproblem.level):
            return [list(map(each, range(max(components) * inner + 1)))]
        return [[each(m * inner)] for m in components]

    def _unfold(
        self, subproblem: _Subproblem, piece: tuple[int, int], used: int, cost: float
    ) -> Iterator[NestedStage]:
        """The pipeline of fewest stages for this piece within `cost`."""
        if subproblem.level == 0:
            yield NestedStage(())
            return
        within = cost * (1 + TIE)
        later, whole = self._pipelines(subproblem, piece, within)
        start, end = piece
        left, offset = _Remaining(used, 0), 0
        if not self._counted or subproblem.level > 1:
            left = _Remaining(int(whole[:, used, start, 0].argmin()), used)
        # The components of each type, to be taken in turn.
        free = [iter(range(self.machines[subproblem.level - 1]))]
        if subproblem.level == len(self.machines):
            free = [iter(machines) for machines in self.device_types.machines]
        while start != end:
            allocation, behind, stop = self._next_stage(
                subproblem, (start, end), left, later, within, first=not offset
            )
            taken = zip(free, allocation.taken, strict=True)
            chosen = tuple(next(machines) for machines, count in taken for _ in range(count))
            replicas = allocation.replicas
            share = Share(subproblem.level, start, stop, offset, replicas, not offset, chosen)
            m, w = allocation.at(behind)
            downstream = allocation.downstream[m][w]
            inner = self._within(subproblem, allocation, downstream)
            inside = float(self._inside(inner, start, slice(stop, stop + 1))[allocation.used, 0])
            for stage in self._unfold(inner, (start, stop), allocation.used, inside):
                yield NestedStage((*stage.shares, share))
            start, left, offset = stop, behind, offset + replicas

    def _next_stage(
        self,
        subproblem: _Subproblem,
        piece: tuple[int, int],
        left: _Remaining,
        later: Floats,
        within: float,
        first: bool,
    ) -> tuple[_Allocation, _Remaining, int]:
        """The first stage of this piece, what it leaves to those behind, and its end."""
        after = self.cuts.after(*piece)
        stops = np.arange(len(self.cuts))[after]
        candidates = []
        for allocation, stages in self._options(subproblem, piece[0], after, first, within):
            behind = allocation.leaves(left)
            if behind is not None:
                rest = later[behind.components, behind.devices, after, 0]
                total = stages[allocation.at(behind)] + rest
                candidates.append((total.min(), allocation, behind, int(stops[total.argmin()])))
        fewest, allocation, behind, stop = min(candidates, key=lambda choice: choice[0])
        assert fewest < inf
        return allocation, behind, stop


def _rounded_up(number: int) -> int:
    """To three binary digits: there are four such numbers between a number and its double."""
    step = 1 << max(0, number.bit_length() - 3)
    return -(-number // step) * step


def _rounded_down(number: int) -> int:
    """To a power of two."""
    return 1 << (number.bit_length() - 1)


@njit(cache=True)
def _extend(table, start, rest, costs, allocation, limits, counting):  # type: ignore[no-untyped-def]
    """Lowers `table[m, w, start, end]` by a stage before each pipeline of `later[m, w, stop, end]`.

    `rest`: `later`, the end of its finite entries, the stops, and the least useful end from each.
    `costs[m, w, k]` is the cost of the stage to `stops[k]`, skipped above `limits[k]`.
    `allocation`: codes of the components behind the stage and of those it takes, and its devices.
    Returns the number of entries examined.
    """
    # table[m + code, w + devices, start, end] = min over stop of
    #     max(costs[m, w, stop], later[m, w, stop, end]), or their sum if counting stages
    # (PipeDream, SOSP 2019, section 3.1)
    later, reach, stops, first_end = rest
    behind, code, devices = allocation
    steps = 0
    for k, m in enumerate(behind):
        for w in range(costs.shape[1]):
            row = costs[min(k, len(costs) - 1), w]
            target = table[m + code, w + devices, start]
            for position, stop in enumerate(stops):
                cost = row[position]
                if cost > limits[position]:
                    continue
                after = later[m, w, stop]
                end_of_reach = reach[m, w, stop]
                steps += end_of_reach - first_end[position]
                if counting:
                    for end in range(first_end[position], end_of_reach):
                        target[end] = min(target[end], cost + after[end])
                else:
                    for end in range(first_end[position], end_of_reach):
                        target[end] = min(target[end], max(cost, after[end]))
    return steps


@njit(cache=True)
def _reach(rows):  # type: ignore[no-untyped-def]
    """[m, w]: one more than the last finite entry of `rows[m, w, end]`."""
    reach = np.zeros(rows.shape[:2], dtype=np.intp)
    for m in range(rows.shape[0]):
        for w in range(rows.shape[1]):
            for end in range(rows.shape[2]):
                if rows[m, w, end] < np.inf:
                    reach[m, w] = end + 1
    return reach


def affordable(
    machines: Sequence[int], device_types: DeviceTypes, by_replicas: bool = False
) -> int:
    """How many cuts `Search` can handle in about half a minute, at most 20,000.

    A memory limit needs a table of each inner level for every number of downstream workers, about
    as many as there are components outside it, and as often for every number of replicas if the
    cost depends on that; device types need one per distinct worst device.
    """
    allocations = [count * (count + 3) / 2 for count in machines[:-1]]
    outermost = prod((count + 1) * (count + 2) / 2 for count in device_types.counts) - 1
    cuts = min(20_000, (_OUTER_BUDGET / outermost) ** (1 / 2))
    distinct = len(device_types.distinct)
    outside = [prod(machines[level + 1 :]) for level in range(len(machines) - 1)]
    tables = [
        distinct * (count ** (1 + by_replicas) if device_types.memory_limited else 1)
        for count in outside
    ]
    inner = sum(map(mul, allocations, tables))
    return int(min(cuts, (_INNER_BUDGET / inner) ** (1 / 3)) if inner else cuts)

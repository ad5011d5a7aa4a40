"""The flat pipeline that finishes a batch soonest: Alpa's inter-operator pass (OSDI 2022,
section 5.2).

A flat pipeline of stages on submeshes (fill_order.py) takes sum t_i + (B - 1) max t_j for B
microbatches. The t_i come from the same StageCost as in the throughput search: the stage's cost
level by level over the components of its submesh, with the link to the stage before it at the level
where the two meet. Pipelines nested in replicated components are not in this space. Machines of
several types may be filled in any order (fill_order.py).

For a bound t_max on the slowest stage, one pass over nested cuts and devices gives the least sum,

    F(c, s) = min over stages (c -> c', s -> s') of t <= t_max of  t + F(c', s'),   F(end, full) = 0

for cut c and fill state s, as in Alpa. Pipelines grow from their end, where the workers behind a
stage, and with them its memory, are known. Alpa tries t_max upwards in steps of epsilon and stops
once B t_max is no better than the best. Here each answer also says that no plan of a lower t_max
has a smaller sum, which excludes whole ranges of t_max: a range between two values that were tried
is closed as soon as its least sum and its lowest t_max promise nothing better than the best, less
B epsilon. The result is within B epsilon of the best, and is the best with epsilon 0.

A pass skips every stage that takes more than t_max, and every cut where the devices before it could
not do by then what comes before it, or those behind it what comes after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from math import inf, nextafter
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pipedream.optimizer.cost.device_types import WorstDevice
from pipedream.optimizer.cost.stage_cost import LevelShare, StageCost
from pipedream.optimizer.cost.stages import TIE, CutFamily, NestedStage, Solution
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.likely_cuts import lightest_states
from pipedream.optimizer.cuts.planning_graph import Floats, Ints
from pipedream.optimizer.search.fill_order import FillOrder, Submesh, nested_stage

_RANGE = 1.02
"""A range of t_max narrower than this ratio is tried at its top, a wider one in its middle."""

# What one plan may take: elementary steps, stages kept in memory, stage costs asked for, and
# questions, one per start, device and number of downstream workers.
_STEPS, _STAGES, _ANSWERS, _QUESTIONS = 1e10, 5e7, 5e8, 2e5
_MEMORY = 10  # a cost that depends on memory takes as long as this many that do not
_MOST_CUTS = 3_000

_FEWEST, _TIMES = 50, 4
"""Cuts for a first plan, and the growth factor for the next."""

_ANY = 1e300
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Latency:
    """The goal of least seconds per batch of `microbatches`.

    The plan may be up to `microbatches` times `epsilon` seconds slower than the best. `layers`: the
    graph is first grouped into this many layers (cuts/layering.py).
    """

    microbatches: int
    epsilon: float = 0.0
    layers: int | None = None

    def seconds(self, total: float, slowest: float) -> float:
        return total + (self.microbatches - 1) * slowest


@dataclass(frozen=True)
class DoneBounds:
    """Bounds on the compute seconds before each cut, which may stand for several downsets.

    A stage takes at least its compute time over the total speed of its devices, so pipelines are
    not explored where too much comes before a cut, or after it, for the devices there.
    """

    least: Floats
    most: Floats

    @staticmethod
    def of(cuts: Cuts) -> DoneBounds:
        return DoneBounds(cuts.seconds, cuts.seconds)

    @staticmethod
    def unknown(cuts: Cuts) -> DoneBounds:
        """Bounds that exclude nothing, for costs that are not seconds."""
        return DoneBounds(np.zeros(len(cuts)), np.zeros(len(cuts)))

    @property
    def whole(self) -> float:
        return float(self.least[-1])


class _Stages(NamedTuple):
    """The stages within the cost limit.

    Those of variant k from cut s are entries `first[s, k]` to `first[s, k + 1]` of `end` and
    `cost`.
    """

    first: NDArray[np.int64]
    end: NDArray[np.int32]
    cost: Floats


class _Pipeline(NamedTuple):
    """The least sum within a bound on each stage, the slowest stage, and for each stage its begin,
    end, submesh and the machines that it begins.
    """

    total: float
    slowest: float
    stages: tuple[tuple[int, int, Submesh, tuple[int, ...]], ...]


class LatencySearch:
    """Finds the flat pipeline of least latency.

    Pipelines that cost more than `within` are not explored. `idle`: stages may end at the cut they
    begin at, except the first and the last cut.

    Work per t_max tried: at most N^2 for N cuts, times the edges of the fill order; a hundredth of
    that with hundreds of devices and many microbatches, where few stages are within t_max. Memory:
    N^2 times the variants of stages, likewise.
    """

    def __init__(
        self,
        cuts: CutFamily,
        done: DoneBounds,
        fill_order: FillOrder,
        cost: StageCost,
        goal: Latency,
        within: float = inf,
        idle: bool = False,
    ) -> None:
        self.cuts = cuts
        self.done = done
        self.fill_order = fill_order
        self.goal = goal
        self.tried = 0
        self.steps = 0  # how much work it was
        # Far below rounding, but enough that ties go to the fewest stages, and stages with work.
        self._tie = 1e-13 * done.whole
        # Every stage adds to the sum, the slowest for each of the B microbatches.
        self._most = min(within * (1 + TIE) / goal.microbatches, _ANY)
        self._batches = batches = _BatchedCosts(cuts, done, fill_order, cost, self._most)
        self._stages = _stages(cuts, fill_order, batches, self._most, self._tie)
        self._idle = _idle(cuts, fill_order, batches) if idle else np.zeros((0, 0))

    def affordable(self) -> int:
        """How many cuts take about ten seconds and a gigabyte, judging by this search."""
        stages, answers = len(self._stages.end) / _STAGES, self._batches.answers / _ANSWERS
        by_square = max(self.steps / _STEPS, stages, answers, 1e-9) ** (-1 / 2)
        cuts = len(self.cuts) * min(by_square, _QUESTIONS / max(self._batches.questions, 1))
        return int(min(_MOST_CUTS, cuts))

    def best(self) -> Solution | None:
        """The best pipeline and its seconds; None if there is none within the cost limit."""
        goal, rest = self.goal, self.goal.microbatches - 1
        slack = goal.microbatches * goal.epsilon
        best = self._within(self._most)
        if best is None:
            return None
        cost = goal.seconds(best.total, best.slowest)
        floor = self.done.whole / float(self.fill_order.capacity[-1])
        ranges = [(floor * (1 - TIE), nextafter(best.slowest, 0.0), best.total)] if rest else []
        # Values of t_max not yet tried: (low, high, the least sum of their plans). A range in
        # (low, high] holds nothing better than the best, less B epsilon, once
        # total + (B - 1) low >= cost - B epsilon; else a pass inside it divides it in two.
        while ranges:
            low, high, total = ranges.pop()
            high = min(high, (cost * (1 - TIE) - slack - total) / rest)
            if high <= low:
                continue
            middle = (low + high) / 2 if high > _RANGE * low else high
            pipeline = self._within(middle)
            if middle < high:
                ranges.append((middle, high, total))
            if pipeline is not None:
                ranges.append((low, nextafter(pipeline.slowest, 0.0), pipeline.total))
                if goal.seconds(pipeline.total, pipeline.slowest) < cost:
                    best, cost = pipeline, goal.seconds(pipeline.total, pipeline.slowest)
        return Solution(cost, tuple(self._nested(best)), bound=cost - slack)

    def _within(self, limit: float) -> _Pipeline | None:
        """The pipeline of least sum whose stages each take at most `limit`."""
        self.tried += 1
        order, capacity = self.fill_order, self.fill_order.capacity
        least, onward, steps = _least(
            self._stages,
            self._idle,
            (order.first, order.source, order.target),
            (order.first_from, order.variant_from, order.target_from),
            (capacity, capacity[order.source], order.skips, order.may_end),
            (self.done.least, self.done.most),
            limit,
        )
        self.steps += steps
        total = float(least[0, self._begins()].min())
        if total == inf:
            return None
        traced = tuple(self._trace(least, onward, limit))
        stages = tuple(stage for _, stage in traced)
        return _Pipeline(total, max(seconds for seconds, _ in traced), stages)

    def _begins(self) -> Ints:
        return np.flatnonzero(self.fill_order.capacity == 0.0)

    def _trace(
        self, least: Floats, onward: Floats, limit: float
    ) -> Iterator[tuple[float, tuple[int, int, Submesh, tuple[int, ...]]]]:
        """Recovers the stages of the best pipeline, each after its cost."""
        fill_order, begins = self.fill_order, self._begins()
        state, start, last = int(begins[least[0, begins].argmin()]), 0, len(self.cuts) - 1
        while start != last:
            variant, cost, end, target = self._next(state, start, least, onward, limit)
            begun = fill_order.newly_begun(state, target)
            yield cost, (start, end, fill_order.submesh(state, variant), begun)
            state, start = target, end
            while start != last and least[start, state] > onward[start, state]:
                skips = fill_order.skips[state]
                state = int(skips[onward[start, skips].argmin()])

    def _next(
        self, state: int, start: int, least: Floats, onward: Floats, limit: float
    ) -> tuple[int, float, int, int]:
        """The first stage of the pipeline from here: variant, cost, end, next state."""
        fill_order, sought = self.fill_order, least[start, state]
        for edge in range(*fill_order.first_from[state : state + 2]):
            variant, target = int(fill_order.variant_from[edge]), int(fill_order.target_from[edge])
            ends, costs = self._of_variant(start, variant)
            through = np.where(costs <= limit, costs + onward[ends, target], inf)
            at = int(through.argmin()) if len(through) else 0
            if len(through) and through[at] <= sought:
                return variant, float(costs[at]), int(ends[at]), target
        raise AssertionError("no stage makes the least sum")

    def _of_variant(self, start: int, variant: int) -> tuple[Ints, Floats]:
        """The ends and costs of the stages of this variant."""
        here = slice(*self._stages.first[start, variant : variant + 2])
        ends, costs = self._stages.end[here].astype(np.intp), self._stages.cost[here]
        if not len(self._idle):
            return ends, costs
        return np.append(ends, start), np.append(costs, self._idle[start, variant])

    def _nested(self, pipeline: _Pipeline) -> Iterator[NestedStage]:
        """The stages on machines, those of each type in turn."""
        free = [iter(machines) for machines in self.fill_order.machines]
        order: list[int] = []
        for start, end, submesh, begun in pipeline.stages:
            for machines, count in zip(free, begun, strict=True):
                order += islice(machines, count)
            yield nested_stage(self.fill_order.mesh, start, end, submesh, order)


def narrowed(
    cuts: Cuts,
    fill_order: FillOrder,
    cost_of: Callable[[Cuts], StageCost],
    goal: Latency,
    done: Callable[[Cuts], DoneBounds] = DoneBounds.of,
) -> LatencySearch:
    """The search over these cuts, limited by the cost of plans over a few of them."""
    within, few = inf, _FEWEST
    while few * _TIMES <= len(cuts):
        some = cuts.subset(lightest_states(cuts, few))
        rough = LatencySearch(some, done(some), fill_order, cost_of(some), goal, within).best()
        within = min(within, rough.cost if rough else inf)
        few *= _TIMES
    return LatencySearch(cuts, done(cuts), fill_order, cost_of(cuts), goal, within)


def _stages(
    cuts: CutFamily, fill_order: FillOrder, batches: _BatchedCosts, most: float, tie: float
) -> _Stages:
    """The stages within `most`. Each costs `tie` more, or twice that if it has no work."""
    count = len(fill_order.variants)
    first = np.zeros((len(cuts), count + 1), dtype=np.int64)
    ends: list[NDArray[np.int32]] = []
    costs: list[Floats] = []
    size = 0
    for start in range(len(cuts) - 1):
        numbers = np.zeros(count, dtype=np.int64)
        for low, high, after, seconds in batches.groups(start):
            seconds = seconds + tie * (1 + (cuts.working[after] == cuts.working[start]))
            rows, columns = np.nonzero(seconds <= most)
            numbers[low:high] = np.bincount(rows, minlength=high - low)
            ends.append(after[columns].astype(np.int32))
            costs.append(seconds[rows, columns])
        first[start, 1:] = np.cumsum(numbers)
        first[start] += size
        size = int(first[start, -1])
    first[-1] = size
    nothing = np.zeros(0)
    return _Stages(
        first,
        np.concatenate(ends) if ends else nothing.astype(np.int32),
        np.concatenate(costs) if costs else nothing,
    )


def _idle(cuts: CutFamily, fill_order: FillOrder, batches: _BatchedCosts) -> Floats:
    """[cut, variant]: the cost of stages that end where they begin."""
    costs = np.full((len(cuts), len(fill_order.variants)), inf)
    for start in range(1, len(cuts) - 1):
        for low, high, _, seconds in batches.groups(start, np.array([start])):
            costs[start, low:high] = seconds[:, 0]
    return costs


class _BatchedCosts:
    """Asks for the costs of stages in batches that differ only in their number of devices."""

    def __init__(
        self, cuts: CutFamily, done: DoneBounds, fill_order: FillOrder, cost: StageCost, most: float
    ) -> None:
        self.cuts, self.done, self.most = cuts, done, most
        self.mesh = fill_order.mesh
        variants = fill_order.variants
        self.cost = {device: cost.on(device) for device in {variant.device for variant in variants}}
        self.parts = []
        self.questions, self.answers = 0, 0
        position = 0
        by_level = groupby(variants, key=lambda variant: (variant.boundary_level, variant.spans))
        for (boundary_level, _), group in by_level:
            members = list(group)
            high = position + len(members)
            shapes = np.array([self.mesh.shape(variant.size) for variant in members])
            alone = [
                (each.device, each.downstream_workers, each.size if cost.depends_on_replicas else 1)
                for each in members
            ]
            capacity = max(variant.size * variant.device.speed for variant in members)
            self.parts.append((position, high, boundary_level, shapes, alone, capacity))
            position = high

    def groups(
        self, start: int, after: Ints | None = None
    ) -> Iterator[tuple[int, int, Ints, Floats]]:
        """(low, high, ends, cost[variant - low, end]) for every batch low <= variant < high.

        The ends are those `after` [default: all after the start] that are not too far for them.
        """
        if after is None:
            after = np.arange(len(self.cuts))[self.cuts.after(start, len(self.cuts) - 1)]
        work = self.done.least[after] - self.done.most[start]
        for low, high, boundary_level, shapes, alone, capacity in self.parts:
            if (boundary_level == 0) != (start == 0):
                continue
            ends = after[work <= self.most * capacity * (1 + _ROUNDING)]
            if len(ends):
                yield low, high, ends, self._costs(start, ends, boundary_level, shapes, alone)

    def _costs(
        self,
        start: int,
        ends: Ints,
        boundary_level: int,
        shapes: Ints,
        alone: list[tuple[WorstDevice, int, int]],
    ) -> Floats:
        known = {case: self.cost[case[0]].on_device(start, ends, *case[1:]) for case in set(alone)}
        any_cost = next(iter(self.cost.values()))
        self.questions += len(known)
        memory = _MEMORY if any_cost.depends_on_downstream else 1
        self.answers += (memory * len(known) + len(alone)) * len(ends)
        inner = np.array([known[case] for case in alone])
        shares = (
            LevelShare(level, start, ends, shapes[:, level - 1 : level], level != boundary_level)
            for level in range(1, shapes.shape[1] + 1)
        )
        return any_cost.price(inner, shares)


@njit(cache=True)
def _least(stages, idle, edges, edges_from, states, done, limit):  # type: ignore[no-untyped-def]
    """Returns least[cut, state], the least sums of pipelines that begin in the state; onward[cut,
    state], of those that follow a stage that ended there; and the number of edges examined.
    """
    # Alpa, OSDI 2022, section 5.2, from the end of the pipeline:
    #   least[c, s] = min over stages (c -> c', s -> s') of cost <= limit of cost + onward[c', s']
    #   onward[c, s] = min(least[c, s], min over s' in skips[s] of onward[c, s'])
    first = stages[0]
    of_variant, source, target = edges
    capacity, source_capacity, skips, may_end = states
    least_done, most_done = done
    cuts, whole, rounding = len(first), least_done[-1], 1e-9 * capacity[-1]
    least = np.full((cuts, len(capacity)), np.inf)
    onward = np.full((cuts, len(capacity)), np.inf)
    for state in may_end:
        onward[cuts - 1, state] = 0.0
    steps = 0
    for start in range(cuts - 2, -1, -1):
        # The least capacity before the cut that can do what comes before it, and the most that
        # leaves enough for what comes after it.
        low = least_done[start] / limit - rounding
        high = capacity[-1] - (whole - most_done[start]) / limit + rounding
        for variant in range(len(of_variant) - 1):
            stop = of_variant[variant + 1]
            capacities = source_capacity[of_variant[variant] : stop]
            begin = of_variant[variant] + np.searchsorted(capacities, low, side="left")
            stop -= len(capacities) - np.searchsorted(capacities, high, side="right")
            entries = first[start, variant], first[start, variant + 1]
            if begin < stop:
                pairs = source[begin:stop], target[begin:stop]
                steps += _lower(least[start], onward, stages, entries, pairs, limit)
        for state in range(len(capacity) - 1, -1, -1):
            if len(idle):
                _add_idle(least[start], onward[start], idle[start], edges_from, state, limit)
            best = least[start, state]
            for skip in skips[state]:
                if skip != state:
                    best = min(best, onward[start, skip])
            onward[start, state] = best
    return least, onward, steps


@njit(cache=True)
def _lower(sums, onward, stages, entries, edges, limit):  # type: ignore[no-untyped-def]
    """Lowers `sums[state]` by these stages, each on every edge of its variant."""
    _, ends, costs = stages
    source, target = edges
    steps = 0
    for entry in range(entries[0], entries[1]):
        cost = costs[entry]
        if cost <= limit:
            after = onward[ends[entry]]
            steps += len(source)
            for edge in range(len(source)):
                sums[source[edge]] = min(sums[source[edge]], cost + after[target[edge]])
    return steps


@njit(cache=True)
def _add_idle(sums, after, idle, edges_from, state, limit):  # type: ignore[no-untyped-def]
    """Lowers `sums[state]` by stages from there that end at the cut they begin at."""
    first, variant, target = edges_from
    for edge in range(first[state], first[state + 1]):
        cost = idle[variant[edge]]
        if cost <= limit:
            sums[state] = min(sums[state], cost + after[target[edge]])

"""The pipeline that brings a batch through soonest: Alpa's inter-operator pass (seeds/002, part 3).

A flat pipeline of stages on submeshes (submesh.py) takes sum t_i + (B - 1) max t_j for B
microbatches, t_i from the same StageCost as the throughput search has: the stage's cost level by
level over the components that its submesh spans, with the link to the stage before it at the level
where the two meet. Pipelines nested in replicated components are not in this space. Machines of
several kinds may be filled in any order (moves.py).

For a bound t_max on the slowest stage, one pass over the nested cuts and the devices gives the
least sum, as in Alpa; like the throughput search it grows pipelines from their end, where the
workers behind a stage and with them its memory are known. Alpa tries t_max upwards in steps of
epsilon and stops once B t_max is no better than the best. Here an answer also says that no plan of
a lower t_max adds up to less, so that whole ranges of t_max are left out: what remains between two
values that were tried is closed as soon as its least sum and its lowest t_max promise nothing
better than the best, less B epsilon. What is given up is never more, and nothing with epsilon 0.

A pass looks at no stage that takes more than t_max, and at no cut where the devices before it
could not have done by then what comes before it, or those behind it what comes after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import inf, nextafter
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pipedream.optimizer.cost.device_types import WorstDevice
from pipedream.optimizer.cost.stage_cost import LevelShare, StageCost
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.likely_cuts import lightest
from pipedream.optimizer.cuts.planning_graph import Floats, Ints
from pipedream.optimizer.search.fill_order import FillOrder
from pipedream.optimizer.search.stages import TIE, CutFamily, NestedStage
from pipedream.optimizer.search.submeshes import Submesh, nested_stage

_RANGE = 1.02
"""A range of t_max narrower than this is tried from above, a wider one in its middle."""

# Elementary steps, stages to keep in memory and to ask the cost of, in what one plan may take; and
# for how many starts it may be asked, with one load on one device.
_STEPS, _STAGES, _ANSWERS, _QUESTIONS = 1e10, 5e7, 5e8, 2e5
_MEMORY = 10  # answers in the time of one where it depends on memory
_MOST_CUTS = 3_000

_FEWEST, _TIMES = 50, 4
"""Cuts for a first plan, and how many times as many for the next."""

_ANY = 1e300
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Latency:
    """Seconds of a batch of `microbatches` is what counts; B `epsilon` of them may be given up.

    `layers`: the graph is first made into so many layers (cluster_operators.py).
    """

    microbatches: int
    epsilon: float = 0.0
    layers: int | None = None

    def seconds(self, total: float, slowest: float) -> float:
        return total + (self.microbatches - 1) * slowest


class LatencySolution(NamedTuple):
    """`cost`: seconds of a batch; `bound`: what no plan over these cuts can be below."""

    cost: float
    bound: float
    stages: tuple[NestedStage, ...]


@dataclass(frozen=True)
class DoneBounds:
    """The compute seconds before each cut: at least and at most, where a cut stands for several.

    A stage takes at least its compute time over what its devices do together, so that pipelines
    need not be looked into where too much is before a cut, or after it, for the devices there.
    """

    least: Floats
    most: Floats

    @staticmethod
    def of(cuts: Cuts) -> DoneBounds:
        return DoneBounds(cuts.seconds, cuts.seconds)

    @staticmethod
    def unknown(cuts: Cuts) -> DoneBounds:
        """For costs that are not seconds: nothing is left out."""
        return DoneBounds(np.zeros(len(cuts)), np.zeros(len(cuts)))

    @property
    def whole(self) -> float:
        return float(self.least[-1])


class _Stages(NamedTuple):
    """The stages that cost no more than is of interest.

    Those of kind k from cut s are entries `first[s, k]` to `first[s, k + 1]` of `end` and `cost`.
    """

    first: NDArray[np.int64]
    end: NDArray[np.int32]
    cost: Floats


class _Pipeline(NamedTuple):
    """The least sum within a bound on each stage, the slowest stage, and (begin, end, submesh)
    of each, with the machines that it is the first on.
    """

    total: float
    slowest: float
    stages: tuple[tuple[int, int, Submesh, tuple[int, ...]], ...]


class _Range(NamedTuple):
    """Slowest stages that were not tried: above `low`, up to `high`; their plans add up to
    `total` at least.
    """

    low: float
    high: float
    total: float


class LatencySearch:
    """`within`: pipelines that cost more need not be found. `idle`: stages may end at the cut that
    they begin at, the first and the last cut excepted.

    Work for each t_max tried: at most N^2 for N cuts, times the moves; a hundredth of that with
    hundreds of devices and many microbatches, where few stages are within t_max. Memory: N^2 times
    the kinds of stages, likewise.
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
        self._asked = asked = _BatchedCosts(cuts, done, fill_order, cost, self._most)
        self._stages = _stages(cuts, fill_order, asked, self._most, self._tie)
        self._idle = _idle(cuts, fill_order, asked) if idle else np.zeros((0, 0))

    def affordable(self) -> int:
        """How many cuts like these take some ten seconds, and a gigabyte, going by what these took
        to search.
        """
        used = self.steps / _STEPS, len(self._stages.end) / _STAGES, self._asked.answers / _ANSWERS
        by_square = max(*used, 1e-9) ** (-1 / 2)
        cuts = len(self.cuts) * min(by_square, _QUESTIONS / max(self._asked.questions, 1))
        return int(min(_MOST_CUTS, cuts))

    def best(self) -> LatencySolution | None:
        """The best pipeline; None if there is none, or none within the cost given."""
        goal, rest = self.goal, self.goal.microbatches - 1
        slack = goal.microbatches * goal.epsilon
        best = self._within(self._most)
        if best is None:
            return None
        cost = goal.seconds(best.total, best.slowest)
        floor = self.done.whole / self.fill_order.whole_capacity
        ranges = [_Range(floor * (1 - TIE), _below(best.slowest), best.total)] if rest else []
        while ranges:
            low, high, total = ranges.pop()
            high = min(high, (cost * (1 - TIE) - slack - total) / rest)
            if high <= low:
                continue
            middle = (low + high) / 2 if high > _RANGE * low else high
            found = self._within(middle)
            if middle < high:
                ranges.append(_Range(middle, high, total))
            if found is not None:
                ranges.append(_Range(low, _below(found.slowest), found.total))
                if goal.seconds(found.total, found.slowest) < cost:
                    best, cost = found, goal.seconds(found.total, found.slowest)
        return LatencySolution(cost, cost - slack, tuple(self._nested(best)))

    def _within(self, limit: float) -> _Pipeline | None:
        """The pipeline of the least sum whose every stage takes at most `limit`."""
        self.tried += 1
        fill_order, done = self.fill_order, self.done
        least, onward, steps = _least(
            self._stages,
            self._idle,
            (fill_order.first, fill_order.source, fill_order.target),
            (fill_order.first_from, fill_order.variant_from, fill_order.target_from),
            (
                fill_order.capacity,
                fill_order.capacity[fill_order.source],
                fill_order.skips,
                fill_order.may_end,
            ),
            (done.least, done.most),
            limit,
        )
        self.steps += steps
        total = self._opening(least)
        if total == inf:
            return None
        found = tuple(self._trace(least, onward, limit))
        stages = tuple(stage for _, stage in found)
        return _Pipeline(total, max(seconds for seconds, _ in found), stages)

    def _begins(self) -> Ints:
        return np.flatnonzero(self.fill_order.capacity == 0.0)

    def _opening(self, least: Floats) -> float:
        return float(least[0, self._begins()].min())

    def _trace(
        self, least: Floats, onward: Floats, limit: float
    ) -> Iterator[tuple[float, tuple[int, int, Submesh, tuple[int, ...]]]]:
        """The stages of the pipeline behind `least[0]`, and what each takes."""
        fill_order, begins = self.fill_order, self._begins()
        state, start, last = int(begins[least[0, begins].argmin()]), 0, len(self.cuts) - 1
        while start != last:
            variant, cost, end, target = self._next(state, start, least, onward, limit)
            begun = fill_order.newly_begun(state, target)
            yield cost, (start, end, fill_order.submesh(state, variant), begun)
            state, start = target, end
            while start != last and least[start, state] > onward[start, state]:
                ways = fill_order.skips[state]
                state = int(ways[onward[start, ways].argmin()])

    def _next(
        self, state: int, start: int, least: Floats, onward: Floats, limit: float
    ) -> tuple[int, float, int, int]:
        """The stage that the pipeline from here begins with: kind, cost, end, where it leads."""
        fill_order, sought = self.fill_order, least[start, state]
        for move in range(*fill_order.first_from[state : state + 2]):
            variant, target = int(fill_order.variant_from[move]), int(fill_order.target_from[move])
            ends, costs = self._of_variant(start, variant)
            through = np.where(costs <= limit, costs + onward[ends, target], inf)
            at = int(through.argmin()) if len(through) else 0
            if len(through) and through[at] <= sought:
                return variant, float(costs[at]), int(ends[at]), target
        raise AssertionError("no stage makes the least sum")

    def _of_variant(self, start: int, variant: int) -> tuple[Ints, Floats]:
        """The ends of stages of this kind, and what they cost."""
        here = slice(*self._stages.first[start, variant : variant + 2])
        ends, costs = self._stages.end[here].astype(np.intp), self._stages.cost[here]
        if not len(self._idle):
            return ends, costs
        return np.append(ends, start), np.append(costs, self._idle[start, variant])

    def _nested(self, pipeline: _Pipeline) -> Iterator[NestedStage]:
        """Its stages on machines: of each kind in turn."""
        free = [iter(machines) for machines in self.fill_order.machines]
        order: list[int] = []
        for start, end, submesh, begun in pipeline.stages:
            for variant, count in enumerate(begun):
                order += [next(free[variant]) for _ in range(count)]
            yield nested_stage(self.fill_order.mesh, start, end, submesh, order)


def narrowed(
    cuts: Cuts,
    fill_order: FillOrder,
    cost_of: Callable[[Cuts], StageCost],
    goal: Latency,
    done: Callable[[Cuts], DoneBounds] = DoneBounds.of,
) -> LatencySearch:
    """The search over these cuts, within what a plan over a few of them costs."""
    within, few = inf, _FEWEST
    while few * _TIMES <= len(cuts):
        some = Cuts(cuts.graph, [cuts.downsets[index] for index in lightest(cuts, few)])
        found = LatencySearch(some, done(some), fill_order, cost_of(some), goal, within).best()
        within = min(within, found.cost if found else inf)
        few *= _TIMES
    return LatencySearch(cuts, done(cuts), fill_order, cost_of(cuts), goal, within)


def _stages(
    cuts: CutFamily, fill_order: FillOrder, asked: _BatchedCosts, most: float, tie: float
) -> _Stages:
    """Those that cost no more than `most`, and `tie` more each, twice that without any work."""
    count = len(fill_order.variants)
    first = np.zeros((len(cuts), count + 1), dtype=np.int64)
    ends: list[NDArray[np.int32]] = []
    costs: list[Floats] = []
    size = 0
    for start in range(len(cuts) - 1):
        numbers = np.zeros(count, dtype=np.int64)
        for low, high, after, seconds in asked.groups(start):
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


def _idle(cuts: CutFamily, fill_order: FillOrder, asked: _BatchedCosts) -> Floats:
    """[cut, kind]: what stages cost that end where they begin."""
    found = np.full((len(cuts), len(fill_order.variants)), inf)
    for start in range(1, len(cuts) - 1):
        for low, high, _, seconds in asked.groups(start, np.array([start])):
            found[start, low:high] = seconds[:, 0]
    return found


class _BatchedCosts:
    """Asks what stages cost, those together that are alike in all but their number of devices."""

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
        for (boundary_level, _), group in groupby(
            variants, key=lambda variant: (variant.boundary_level, variant.spans)
        ):
            members = list(group)
            high = position + len(members)
            shapes = np.array([self.mesh.shape(variant.size) for variant in members])
            alone = [(variant.device, variant.downstream_workers) for variant in members]
            capacity = max(variant.size * variant.device.speed for variant in members)
            self.parts.append((position, high, boundary_level, shapes, alone, capacity))
            position = high

    def groups(
        self, start: int, after: Ints | None = None
    ) -> Iterator[tuple[int, int, Ints, Floats]]:
        """(low, high, ends, cost[kind - low, end]) for every group of kinds low <= kind < high.

        The ends are those `after`, or else all cuts after the start, that are not too far for them.
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
        alone: list[tuple[WorstDevice, int]],
    ) -> Floats:
        known = {
            (device, downstream_workers): self.cost[device].on_device(
                start, ends, downstream_workers
            )
            for device, downstream_workers in set(alone)
        }
        asked = next(iter(self.cost.values()))
        self.questions += len(known)
        memory = _MEMORY if asked.depends_on_downstream else 1
        self.answers += (memory * len(known) + len(alone)) * len(ends)
        inner = np.array([known[case] for case in alone])
        shares = (
            LevelShare(level, start, ends, shapes[:, level - 1 : level], level != boundary_level)
            for level in range(1, shapes.shape[1] + 1)
        )
        return asked.price(inner, shares)


@njit(cache=True)
def _least(stages, idle, fill_order, transitions_from, states, done, limit):  # type: ignore[no-untyped-def]
    """[cut, spot]: the least sum of stages from here on that begin at the spot, and that come after
    a stage that ended at it; and how many ways on were looked at.
    """
    first = stages[0]
    of_variant, source, target = fill_order
    capacity, source_capacity, skips, may_end = states
    least_done, most_done = done
    cuts, whole, rounding = len(first), least_done[-1], 1e-9 * capacity[-1]
    least = np.full((cuts, len(capacity)), np.inf)
    onward = np.full((cuts, len(capacity)), np.inf)
    for state in may_end:
        onward[cuts - 1, state] = 0.0
    steps = 0
    for start in range(cuts - 2, -1, -1):
        # What the devices before the cut have to do together, and those after it.
        low = least_done[start] / limit - rounding
        high = capacity[-1] - (whole - most_done[start]) / limit + rounding
        for variant in range(len(of_variant) - 1):
            stop = of_variant[variant + 1]
            some = source_capacity[of_variant[variant] : stop]
            begin = of_variant[variant] + np.searchsorted(some, low, side="left")
            stop -= len(some) - np.searchsorted(some, high, side="right")
            entries = first[start, variant], first[start, variant + 1]
            if begin < stop:
                those = source[begin:stop], target[begin:stop]
                steps += _lower(least[start], onward, stages, entries, those, limit)
        for state in range(len(capacity) - 1, -1, -1):
            if len(idle):
                _add_idle(least[start], onward[start], idle[start], transitions_from, state, limit)
            best = least[start, state]
            for skip in skips[state]:
                if skip != state:
                    best = min(best, onward[start, skip])
            onward[start, state] = best
    return least, onward, steps


@njit(cache=True)
def _lower(sums, onward, stages, entries, fill_order, limit):  # type: ignore[no-untyped-def]
    """Lowers `sums[state]` by these stages, each in every place that the moves allow."""
    _, ends, costs = stages
    source, target = fill_order
    steps = 0
    for boundary_level in range(entries[0], entries[1]):
        cost = costs[boundary_level]
        if cost <= limit:
            after = onward[ends[boundary_level]]
            steps += len(source)
            for move in range(len(source)):
                sums[source[move]] = min(sums[source[move]], cost + after[target[move]])
    return steps


@njit(cache=True)
def _add_idle(sums, after, idle, transitions_from, state, limit):  # type: ignore[no-untyped-def]
    """Lowers `sums[state]` by stages from there that end at the cut they begin at."""
    first, variant, target = transitions_from
    for move in range(first[state], first[state + 1]):
        cost = idle[variant[move]]
        if cost <= limit:
            sums[state] = min(sums[state], cost + after[target[move]])


def _below(seconds: float) -> float:
    return nextafter(seconds, 0.0)

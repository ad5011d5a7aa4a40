"""The pipeline that brings a batch through soonest: Alpa's inter-operator pass (seeds/002, part 3).

A flat pipeline of stages on submeshes (submesh.py) takes sum t_i + (B - 1) max t_j for B
microbatches, t_i from the same StageCost as the throughput search has: the stage's cost level by
level over the components that its submesh spans, with the link to the stage before it at the level
where the two meet. Pipelines nested in replicated components are not in this space.

For a bound t_max on the slowest stage, one pass over the nested cuts and the devices gives the
least sum, as in Alpa; like the throughput search it grows pipelines from their end, where the
workers behind a stage and with them its memory are known. Alpa tries t_max upwards in steps of
epsilon and stops once B t_max is no better than the best. Here an answer also says that no plan of
a lower t_max adds up to less, so that whole ranges of t_max are left out: what remains between two
values that were tried is closed as soon as its least sum and its lowest t_max promise nothing
better than the best, less B epsilon. What is given up is never more, and nothing with epsilon 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, nextafter
from typing import NamedTuple

import numpy as np

from pipedream.optimizer.cuts import Cuts, States
from pipedream.optimizer.hierarchy import TIE, NestedStage, Rules
from pipedream.optimizer.planning import Floats, Ints
from pipedream.optimizer.stage_cost import StageCost
from pipedream.optimizer.submesh import Mesh, Submesh, nested_stage

# Elementary steps that one pass may have; about 20 are made. Costs of stages that may be kept.
_STEPS = 8e8
_COSTS = 3e8

_RANGE = 1.02
"""A range of t_max narrower than this is tried from above, a wider one in its middle."""


@dataclass(frozen=True)
class Latency:
    """Seconds of a batch of `microbatches` is what counts; B `epsilon` of them may be given up.

    `layers`: the graph is first made into so many layers (cluster_operators.py); None for as many
    as there is time for, and only where its cuts are more than that.
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


class _Kind(NamedTuple):
    """All that the cost of a stage depends on beside its cuts."""

    size: int
    entry: int
    load: int


class _Spot(NamedTuple):
    """Where stages begin or have ended, and the workers from there on (0 where not counted)."""

    device: int
    workers: int


@dataclass(frozen=True)
class _Moves:
    """Stages that may be placed, ordered by the spot they begin at.

    Entry m: a stage of kind `kind[m]` leads from spot `source[m]` to spot `target[m]`. `first[i]`
    is the first entry of spot `spots[i]`.
    """

    kind: Ints
    source: Ints
    target: Ints
    spots: Ints
    first: Ints

    @staticmethod
    def of(moves: list[tuple[int, int, int]]) -> _Moves:
        source, kind, target = np.array(sorted(moves), dtype=np.intp).reshape(-1, 3).T
        spots, first = np.unique(source, return_index=True)
        return _Moves(kind, source, target, spots, first)

    def from_spot(self, spot: int) -> _Moves:
        here = self.source == spot
        one = np.zeros(1, dtype=np.intp)
        return _Moves(self.kind[here], self.source[here], self.target[here], one + spot, one)


class _Pipeline(NamedTuple):
    """The least sum within a bound on each stage, the slowest stage, and (begin, end, submesh)."""

    total: float
    slowest: float
    stages: tuple[tuple[int, int, Submesh], ...]


class _Range(NamedTuple):
    """Slowest stages that were not tried: above `low`, up to `high`; their plans add up to
    `total` at least.
    """

    low: float
    high: float
    total: float


class LatencySearch:
    """Work for each t_max tried: N^2 for N cuts, times the submeshes of the cluster."""

    def __init__(
        self, cuts: Cuts, mesh: Mesh, cost: StageCost, rules: Rules, goal: Latency
    ) -> None:
        self.cuts = cuts
        self.mesh = mesh
        self.cost = cost
        self.goal = goal
        self.tried = 0
        self._straight = rules.straight
        self._fewer = rules.fewer_machines
        self._counted = cost.depends_on_load and rules.fewer_machines
        self._spots = list(self._all_spots())
        self._number = {spot: number for number, spot in enumerate(self._spots)}
        self._kinds: list[_Kind] = []
        self._opening, self._following = self._all_moves()
        self._onward = self._all_onward()
        self._stages: list[tuple[States, Floats] | None] = [None] * len(cuts)
        # Far below rounding, but enough that ties go to the fewest stages, and stages with work.
        self._tie = 1e-13 * float(cuts.seconds[-1])

    def best(self, floor: float = 0.0) -> LatencySolution | None:
        """The best pipeline; None if there is none. `floor`: no slowest stage is faster."""
        goal, rest = self.goal, self.goal.microbatches - 1
        slack = goal.microbatches * goal.epsilon
        best = self._within(inf)
        if best is None:
            return None
        cost = goal.seconds(best.total, best.slowest)
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
        stages = tuple(nested_stage(self.mesh, *stage) for stage in best.stages)
        return LatencySolution(cost, cost - slack, stages)

    def _within(self, limit: float) -> _Pipeline | None:
        """The pipeline of the least sum whose every stage takes at most `limit`."""
        self.tried += 1
        least, onward = self._least(limit)
        begins = [n for n, spot in enumerate(self._spots) if spot.device == 0]
        spot = min(begins, key=lambda number: least[number, 0])
        total = float(least[spot, 0])
        if total == inf:
            return None
        stages = tuple(self._trace(spot, onward, least, limit))
        slowest = max(seconds for seconds, _ in stages)
        return _Pipeline(total, slowest, tuple(stage for _, stage in stages))

    def _least(self, limit: float) -> tuple[Floats, Floats]:
        """[spot, cut]: the least sum of stages from here on that begin at the spot, and that come
        after a stage that ended at it.
        """
        shape = len(self._spots), len(self.cuts)
        least, onward = np.full(shape, inf), np.full(shape, inf)
        onward[[n for n, spot in enumerate(self._spots) if self._may_end(spot)], -1] = 0.0
        for start in reversed(range(len(self.cuts) - 1)):
            moves = self._following if start else self._opening
            if len(moves.kind):
                through = self._through(start, moves, onward, limit).min(axis=1)
                least[moves.spots, start] = np.minimum.reduceat(through, moves.first)
            onward[:, start] = least[self._onward, start].min(axis=1)
        return least, onward

    def _through(self, start: int, moves: _Moves, onward: Floats, limit: float) -> Floats:
        """[move, end]: the least sum from cut `start` on with this stage first."""
        after, costs = self._costs(start)
        costs = np.where(costs <= limit, costs, inf)
        through: Floats = costs[moves.kind] + onward[:, after][moves.target]
        return through

    def _costs(self, start: int) -> tuple[States, Floats]:
        """The cuts that a stage from `start` may end at, and [kind, end] what it then takes."""
        known = self._stages[start]
        if known is None:
            after = self.cuts.after(start, len(self.cuts) - 1)
            idle = self.cuts.working[after] == self.cuts.working[start]
            costs = self._ask(start, after) + self._tie * (1 + idle)
            known = self._stages[start] = after, costs
        return known

    def _ask(self, start: int, after: States) -> Floats:
        loads = sorted({kind.load for kind in self._kinds})
        alone = {load: self.cost.on_device(start, after, load) for load in loads}
        seconds = np.array([alone[kind.load] for kind in self._kinds])
        for entry in {kind.entry for kind in self._kinds if (kind.entry == 0) == (start == 0)}:
            rows = [row for row, kind in enumerate(self._kinds) if kind.entry == entry]
            shapes = np.array([self.mesh.shape(self._kinds[row].size) for row in rows])
            here = seconds[rows]
            for level in range(1, len(self.mesh.machines) + 1):
                replicas = shapes[:, level - 1 : level]
                first = level != entry
                here = self.cost.replicated(here, start, after, level, replicas, first)
            seconds[rows] = here
        return seconds

    def _all_spots(self) -> Iterator[_Spot]:
        for device in range(self.mesh.devices + 1):
            most = self.mesh.devices - device if self._counted else 0
            for workers in range(most + 1):
                yield _Spot(device, workers)

    def _all_moves(self) -> tuple[_Moves, _Moves]:
        """The stages that begin a pipeline, and the others."""
        kinds: dict[_Kind, int] = {}
        opening: list[tuple[int, int, int]] = []
        following: list[tuple[int, int, int]] = []
        for number, spot in enumerate(self._spots):
            if spot.device == self.mesh.devices:
                continue
            for submesh in self.mesh.submeshes(spot.device, self._straight):
                workers = spot.workers - submesh.size if self._counted else 0
                if workers >= 0:
                    target = self._number[_Spot(spot.device + submesh.size, workers)]
                    kind = kinds.setdefault(self._kind(submesh, workers), len(kinds))
                    moves = following if spot.device else opening
                    moves.append((number, kind, target))
        self._kinds = list(kinds)
        return _Moves.of(opening), _Moves.of(following)

    def _kind(self, submesh: Submesh, workers: int) -> _Kind:
        if not self.cost.depends_on_load:
            return _Kind(submesh.size, submesh.entry, 0)
        behind = workers if self._counted else self.mesh.devices - submesh.begin - submesh.size
        return _Kind(submesh.size, submesh.entry, ceil(behind / submesh.size))

    def _all_onward(self) -> Ints:
        """[spot, choice]: the spots at which a stage may begin after one that ended at the spot."""
        if not self._fewer:
            return np.arange(len(self._spots))[:, None]
        rows = []
        for number, spot in enumerate(self._spots):
            begins = (_Spot(device, spot.workers) for device in self.mesh.onwards(spot.device))
            choices = [self._number[begin] for begin in begins if begin in self._number]
            width = len(self.mesh.within)
            rows.append((choices + [number] * width)[:width])
        return np.array(rows)

    def _may_end(self, spot: _Spot) -> bool:
        return spot.workers == 0 if self._fewer else spot.device == self.mesh.devices

    def _trace(
        self, spot: int, onward: Floats, least: Floats, limit: float
    ) -> Iterator[tuple[float, tuple[int, int, Submesh]]]:
        """The stages of the pipeline behind `least[spot, 0]`, and what each takes."""
        start, last = 0, len(self.cuts) - 1
        while start != last:
            moves = (self._following if start else self._opening).from_spot(spot)
            through = self._through(start, moves, onward, limit)
            move, column = np.unravel_index(through.argmin(), through.shape)
            after, costs = self._costs(start)
            end = int(np.arange(len(self.cuts))[after][column])
            kind = self._kinds[moves.kind[move]]
            submesh = Submesh(self._spots[spot].device, kind.size, kind.entry)
            yield float(costs[moves.kind[move], column]), (start, end, submesh)
            choices = self._onward[moves.target[move]]
            spot, start = int(choices[least[choices, end].argmin()]), end


def _below(seconds: float) -> float:
    return nextafter(seconds, 0.0)


def affordable_cuts(machines: Sequence[int], with_memory: bool = False) -> int:
    """How many cuts `LatencySearch` gets through in about half a minute, at most 3,000.

    With a memory limit the cost of a submesh is another for every number of workers behind it.
    """
    mesh = Mesh(machines)
    moves = [submesh for begin in range(mesh.devices) for submesh in mesh.submeshes(begin)]
    kinds = len(moves) if with_memory else len({(move.size, move.entry) for move in moves})
    return int(min(3_000, (_STEPS / len(moves)) ** (1 / 2), (_COSTS / kinds) ** (1 / 2)))

"""Prunes cuts: only those that a plan below a given time may have need to be searched.

Similar cuts are grouped, and a stage between two groups is priced at the least that any stage
between their members can cost: the least compute and parameters, the fewest bytes, and nested if
any might be. A group that no pipeline of such stages passes within the time holds no cut of a
better plan and is dropped. The others are divided into smaller groups, until each cut is its own
group or little more can be dropped. Then the same is done for the pipelines inside the stages that
are left.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost.device_types import DeviceTypes
from pipedream.optimizer.cost.models import CostModel, Work
from pipedream.optimizer.cost.stage_cost import Bools, levels
from pipedream.optimizer.cost.stages import TIE, Rules
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.planning_graph import Floats, Ints

# Entries of the tables of stages, which sets how many groups there may be, and the most of those.
_CELLS, _MOST = 1.6e7, 1_000


@dataclass(frozen=True)
class PruningProblem:
    """The cluster, cost model and rules of the plans.

    Memory limits and recomputation are ignored, since they make no plan faster.
    """

    cluster: Cluster
    model: CostModel
    rules: Rules


@dataclass(frozen=True)
class _CutRange:
    """Pipelines in one component of `level` (1 innermost), from one of the states `starts` to one
    of `ends`, in less than `within` seconds.
    """

    level: int
    starts: Ints
    ends: Ints
    within: float


def prune_cuts(cuts: Cuts, problem: PruningProblem, within: float) -> Ints:
    """The states, in order, at which a plan below `within` seconds may cut, at any level.

    Possibly a few too many; the first and the last state are left out.
    """
    kept = np.zeros(len(cuts), np.bool_)
    ends = np.array([0]), np.array([len(cuts) - 1])
    _keep(kept, cuts, problem, _CutRange(len(problem.cluster.machines), *ends, within * (1 - TIE)))
    kept[[0, -1]] = False
    return np.flatnonzero(kept)


def _keep(kept: Bools, cuts: Cuts, problem: PruningProblem, span: _CutRange) -> None:
    """Marks in `kept` the states at which pipelines of this range may cut."""
    alive = _between(cuts, span)
    while True:
        groups = _CutGroups.of(cuts, alive, problem, span)
        table = _ReachabilityTable(groups, problem, span)
        before, alive = len(alive), _passed(cuts, table)
        if not len(alive) or len(alive) > 0.8 * before:
            break
    kept[alive] = True
    if span.level > 1:
        for inside in table.inside():
            if not kept[_between(cuts, inside)].all():
                _keep(kept, cuts, problem, inside)


def _passed(cuts: Cuts, table: _ReachabilityTable) -> Ints:
    """The states, in order, at which pipelines may cut so that, for some m, m components have time
    for what is before the cut and the others for what is after it: by any cost model a stage on m
    takes at least an m-th of its time.
    """
    groups, span = table.groups, table.span
    passed = np.repeat(table.passed, list(map(len, groups.states)), axis=1)
    order = np.concatenate(groups.states)
    seconds = cuts.seconds[order]
    time = np.arange(len(passed))[:, None] * span.within * table.share * (1 + TIE)
    passed &= seconds - cuts.seconds[span.starts].max() <= time
    passed &= cuts.seconds[span.ends].min() - seconds <= time[::-1]
    inner = slice(len(span.starts), len(order) - len(span.ends))
    states: Ints = np.sort(order[inner][passed[:, inner].any(axis=0)])
    return states


def _between(cuts: Cuts, span: _CutRange) -> Ints:
    """The states that may be inside the range."""
    least = np.bitwise_and.reduce(cuts.words[span.starts])
    most = np.bitwise_or.reduce(cuts.words[span.ends])
    inside = ((cuts.words & least) == least).all(axis=1) & ((cuts.words | most) == most).all(axis=1)
    for ends in (span.starts, span.ends):
        if len(ends) == 1:
            inside[ends] = False
    return np.flatnonzero(inside)


@dataclass(frozen=True)
class _CutGroups:
    """Groups of states: the first has all starts of a range, the last all ends.

    `seconds`, `parameters`: the least and the most of each group. `held_by_all` and `held_by_any`,
    [group, word]: the nodes before all cuts of the group, or before any.
    """

    states: tuple[Ints, ...]
    seconds: tuple[Floats, Floats]
    parameters: tuple[Floats, Floats]
    bytes_across: Floats
    held_by_all: NDArray[np.uint64]
    held_by_any: NDArray[np.uint64]

    @staticmethod
    def of(cuts: Cuts, alive: Ints, problem: PruningProblem, span: _CutRange) -> _CutGroups:
        most = int(min(_MOST, (_CELLS / problem.cluster.machines[span.level - 1]) ** 0.5))
        bandwidth = problem.cluster.bandwidth[span.level - 1]
        alike = cuts.seconds, cuts.parameter_bytes / bandwidth, cuts.bytes_across / bandwidth
        states = span.starts, *_alike(np.column_stack(alike), alive, most), span.ends
        order = np.concatenate(states)
        first = np.cumsum([0, *map(len, states[:-1])])

        def over(join: np.ufunc, values: NDArray[Any]) -> NDArray[Any]:
            return np.asarray(join.reduceat(values[order], first, axis=0))

        return _CutGroups(
            states,
            (over(np.minimum, cuts.seconds), over(np.maximum, cuts.seconds)),
            (over(np.minimum, cuts.parameter_bytes), over(np.maximum, cuts.parameter_bytes)),
            over(np.minimum, cuts.bytes_across),
            over(np.bitwise_and, cuts.words),
            over(np.bitwise_or, cuts.words),
        )

    def __len__(self) -> int:
        return len(self.states)

    def members(self, groups: Bools) -> Ints:
        """The states of these groups, in order and each once."""
        of_groups = [states for states, chosen in zip(self.states, groups, strict=True) if chosen]
        return np.unique(np.concatenate(of_groups)) if of_groups else np.empty(0, np.intp)

    @cached_property
    def nested(self) -> Bools:
        """[start, end]: whether a cut of one group may be nested in a cut of the other."""
        nested = self.seconds[0][:, None] <= self.seconds[1]
        nested &= self.parameters[0][:, None] <= self.parameters[1]
        for inside, outside in zip(self.held_by_all.T, ~self.held_by_any.T, strict=True):
            nested &= (inside[:, None] & outside) == 0
        np.fill_diagonal(nested, [len(states) > 1 for states in self.states])
        nested[:, 0] = nested[-1] = False
        return nested


def _alike(figures: Floats, states: Ints, most: int) -> Iterator[Ints]:
    """Divides the states into at most `most` groups by halving, again and again, the widest figure
    of the widest group. `figures[state]` are comparable amounts.
    """
    heap: list[tuple[float, int, int, Ints]] = []

    def add(group: Ints) -> None:
        values = figures[group]
        spread = values.max(axis=0) - values.min(axis=0)
        widest = int(spread.argmax())
        heapq.heappush(heap, (-float(spread[widest]), int(group[0]), widest, group))

    if len(states):
        add(states)
    while heap and len(heap) < most and heap[0][0] < 0:
        *_, widest, group = heapq.heappop(heap)
        values = figures[group, widest]
        low, high = values.min(), values.max()
        middle = low + (high - low) / 2
        first = values <= (middle if middle < high else low)
        add(group[first])
        add(group[~first])
    return (group for *_, group in heap)


class _ReachabilityTable:
    """Which groups can be reached, from both ends, by pipelines of a range within its time."""

    def __init__(self, groups: _CutGroups, problem: PruningProblem, span: _CutRange) -> None:
        self.groups = groups
        self.span = span
        self.model = problem.model
        self.components = problem.cluster.machines[span.level - 1]
        most = 1 if problem.rules.straight else self.components
        self.replicas = np.arange(1, most + 1)[:, None]
        self.fewer = problem.rules.fewer_machines
        self.level = levels(problem.cluster)[span.level - 1]
        inside = prod(problem.cluster.machines[: span.level - 1])
        self.share = inside * DeviceTypes.of(problem.cluster).fastest
        self.stages = np.array([self._stages(start) for start in range(len(groups))])
        self.stages = self.stages.transpose(1, 0, 2)

    def _stages(self, start: int) -> Bools:
        """[replicas - 1, end]: whether such a stage may be within the time."""
        seconds = np.maximum(self.groups.seconds[0] - self.groups.seconds[1][start], 0.0)
        costs = self._costs(seconds[None] / self.share, start)
        feasible: Bools = (costs < self.span.within) & self.groups.nested[start]
        return feasible

    def _costs(self, inner: Floats, start: int) -> Floats:
        """[replicas - 1, end]: the least seconds of the stages from one group."""
        groups, across = self.groups, self.groups.bytes_across
        parameters = np.maximum(groups.parameters[0] - groups.parameters[1][start], 0.0)
        work = Work(inner, parameters, float(across[start]), across)
        terms = self.model.terms(work, self.level, self.replicas, first=start == 0)
        return self.model.seconds(terms)

    @property
    def passed(self) -> Bools:
        """[m, group]: whether a pipeline may cut there, with m components before."""
        return self._before & self._after[::-1]

    @cached_property
    def _before(self) -> Bools:
        """[m, group]: whether m components may make a pipeline that ends there."""
        return self._reachable(0, 0, self.stages)

    @cached_property
    def _after(self) -> Bools:
        """[m, group]: whether m components may make the rest of one."""
        none_left = slice(None) if self.fewer else 0
        return self._reachable(none_left, -1, self.stages.transpose(0, 2, 1))

    def _reachable(self, m_there: int | slice, group: int, steps: Bools) -> Bools:
        """[m, group]: which groups `steps[replicas - 1, from, to]` lead to from this one."""
        reachable = np.zeros((self.components + 1, len(self.groups)), np.bool_)
        reachable[m_there, group] = True
        for m in range(1, self.components + 1):
            for replicas, there in enumerate(steps[:m], start=1):
                reachable[m] |= there[reachable[m - replicas]].any(axis=0)
        return reachable

    def inside(self) -> Iterator[_CutRange]:
        """The ranges of the pipelines inside the stages: one for all stages with the same number of
        components before and the same number of replicas.
        """
        for replicas, stages in enumerate(self.stages, start=1):
            inner = np.full((1, len(self.groups)), replicas * self.span.within)
            for before in range(self.components + 1 - replicas):
                after = self._after[self.components - before - replicas]
                passing = stages & self._before[before][:, None] & after
                starts, ends = passing.any(axis=1), passing.any(axis=0)
                if not starts.any():
                    continue
                # Costs grow by at most 1/replicas per second inside: the most seconds inside that
                # can bring a stage down to the time of the range.
                least = min(
                    self._costs(inner, start)[replicas - 1][passing[start]].min()
                    for start in np.flatnonzero(starts).tolist()
                )
                over = least - self.span.within
                most = replicas * (self.span.within - over) * (1 + TIE)
                members = self.groups.members
                yield _CutRange(self.span.level - 1, members(starts), members(ends), float(most))

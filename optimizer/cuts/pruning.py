"""Which cuts a plan may have that takes less than a given time: no other needs to be searched.

Cuts that are alike are put into one group, and a stage between two groups is costed at the least
that any stage between their members can be: the least compute and parameters, the fewest bytes, and
nested if any might be. A group through which no pipeline of such stages passes holds no cut of a
plan of interest, and is dropped. The others are divided into smaller groups, until each cut is its
own or little more can be dropped. Then the same is asked of the pipelines inside the stages that
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
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.planning_graph import Floats, Ints
from pipedream.optimizer.search.stages import TIE, Rules

# Entries of the tables of stages, which sets how many groups there may be, and the most of those.
_CELLS, _MOST = 1.6e7, 1_000


@dataclass(frozen=True)
class PruningProblem:
    """Plans on which cluster, by which model and rules.

    Neither a limit of memory nor recomputation makes any plan faster: they need not be known.
    """

    cluster: Cluster
    model: CostModel
    rules: Rules


@dataclass(frozen=True)
class _Subrange:
    """Of the model, for pipelines in one component of `level` (1 innermost): from one of the states
    `starts` to one of `ends`, in less than `within` seconds.
    """

    level: int
    starts: Ints
    ends: Ints
    within: float


def prune_cuts(cuts: Cuts, question: PruningProblem, within: float) -> Ints:
    """The states, in order, at which a plan that takes less than `within` may be cut, at any level.

    As few as can be shown in a few rounds; the first and the last are left out.
    """
    kept = np.zeros(len(cuts), np.bool_)
    ends = np.array([0]), np.array([len(cuts) - 1])
    _keep(
        kept, cuts, question, _Subrange(len(question.cluster.machines), *ends, within * (1 - TIE))
    )
    kept[[0, -1]] = False
    return np.flatnonzero(kept)


def _keep(kept: Bools, cuts: Cuts, question: PruningProblem, piece: _Subrange) -> None:
    """Marks the states at which pipelines of this piece may be cut."""
    alive = _between(cuts, piece)
    while True:
        groups = _CutGroups.of(cuts, alive, question, piece)
        passage = _ReachabilityTable(groups, question, piece)
        before, alive = len(alive), _passed(cuts, passage)
        if not len(alive) or len(alive) > 0.8 * before:
            break
    kept[alive] = True
    if piece.level > 1:
        for inside in passage.inside():
            if not kept[_between(cuts, inside)].all():
                _keep(kept, cuts, question, inside)


def _passed(cuts: Cuts, passage: _ReachabilityTable) -> Ints:
    """The states, in order, where pipelines may be cut so that m components have time for what is
    before the cut, and the others for what is after it, for some m: by any cost model a stage on m
    takes an m-th of its time.
    """
    groups, piece = passage.groups, passage.piece
    passed = np.repeat(passage.passed, list(map(len, groups.states)), axis=1)
    order = np.concatenate(groups.states)
    seconds = cuts.seconds[order]
    time = np.arange(len(passed))[:, None] * piece.within * passage.share * (1 + TIE)
    passed &= seconds - cuts.seconds[piece.starts].max() <= time
    passed &= cuts.seconds[piece.ends].min() - seconds <= time[::-1]
    inner = slice(len(piece.starts), len(order) - len(piece.ends))
    found: Ints = np.sort(order[inner][passed[:, inner].any(axis=0)])
    return found


def _between(cuts: Cuts, piece: _Subrange) -> Ints:
    """The states that may be inside the piece."""
    least = np.bitwise_and.reduce(cuts.words[piece.starts])
    most = np.bitwise_or.reduce(cuts.words[piece.ends])
    inside = ((cuts.words & least) == least).all(axis=1) & ((cuts.words | most) == most).all(axis=1)
    for ends in (piece.starts, piece.ends):
        if len(ends) == 1:
            inside[ends] = False
    return np.flatnonzero(inside)


@dataclass(frozen=True)
class _CutGroups:
    """Groups of states: the first all starts of a piece, the last all ends, the others in between.

    `seconds`, `parameters`: the least and the most of each group. `held_by_all` and `held_by_any`:
    [group, word], nodes that are before all cuts or any.
    """

    states: tuple[Ints, ...]
    seconds: tuple[Floats, Floats]
    parameters: tuple[Floats, Floats]
    bytes_across: Floats
    held_by_all: NDArray[np.uint64]
    held_by_any: NDArray[np.uint64]

    @staticmethod
    def of(cuts: Cuts, alive: Ints, question: PruningProblem, piece: _Subrange) -> _CutGroups:
        most = int(min(_MOST, (_CELLS / question.cluster.machines[piece.level - 1]) ** 0.5))
        bandwidth = question.cluster.bandwidth[piece.level - 1]
        alike = cuts.seconds, cuts.parameter_bytes / bandwidth, cuts.bytes_across / bandwidth
        states = piece.starts, *_alike(np.column_stack(alike), alive, most), piece.ends
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
        found = [states for states, chosen in zip(self.states, groups, strict=True) if chosen]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.intp)

    @cached_property
    def nested(self) -> Bools:
        """[start, end]: whether some cut of the one may be inside another cut of the other."""
        found = self.seconds[0][:, None] <= self.seconds[1]
        found &= self.parameters[0][:, None] <= self.parameters[1]
        for inside, outside in zip(self.held_by_all.T, ~self.held_by_any.T, strict=True):
            found &= (inside[:, None] & outside) == 0
        np.fill_diagonal(found, [len(states) > 1 for states in self.states])
        found[:, 0] = found[-1] = False
        return found


def _alike(figures: Floats, states: Ints, most: int) -> Iterator[Ints]:
    """Divides the states into at most `most` groups: always the one that differs most, in halves
    of what it differs in. `figures[state]` are comparable amounts.
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
    """Which groups are passed by pipelines of a piece that take less than it says."""

    def __init__(self, groups: _CutGroups, question: PruningProblem, piece: _Subrange) -> None:
        self.groups = groups
        self.piece = piece
        self.model = question.model
        self.components = question.cluster.machines[piece.level - 1]
        most = 1 if question.rules.straight else self.components
        self.replicas = np.arange(1, most + 1)[:, None]
        self.fewer = question.rules.fewer_machines
        self.level = levels(question.cluster)[piece.level - 1]
        inside = prod(question.cluster.machines[: piece.level - 1])
        self.share = inside * DeviceTypes.of(question.cluster).fastest
        self.stages = np.array([self._stages(start) for start in range(len(groups))])
        self.stages = self.stages.transpose(1, 0, 2)

    def _stages(self, start: int) -> Bools:
        """[replicas - 1, end]: whether such a stage may take less than the piece says."""
        seconds = np.maximum(self.groups.seconds[0] - self.groups.seconds[1][start], 0.0)
        costs = self._costs(seconds[None] / self.share, start)
        found: Bools = (costs < self.piece.within) & self.groups.nested[start]
        return found

    def _costs(self, inner: Floats, start: int) -> Floats:
        """[replicas - 1, end]: the least seconds of the stages from one group."""
        groups, across = self.groups, self.groups.bytes_across
        parameters = np.maximum(groups.parameters[0] - groups.parameters[1][start], 0.0)
        work = Work(inner, parameters, float(across[start]), across)
        terms = self.model.terms(work, self.level, self.replicas, first=start == 0)
        return self.model.seconds(terms)

    @property
    def passed(self) -> Bools:
        """[m, group]: whether a pipeline is cut there, with m components before."""
        return self._before & self._after[::-1]

    @cached_property
    def _before(self) -> Bools:
        """[m, group]: whether m components may make a pipeline that ends there."""
        found = np.zeros((self.components + 1, len(self.groups)), np.bool_)
        found[0, 0] = True
        for m in range(1, self.components + 1):
            for replicas, stages in enumerate(self.stages[:m], start=1):
                found[m] |= stages[found[m - replicas]].any(axis=0)
        return found

    @cached_property
    def _after(self) -> Bools:
        """[m, group]: whether m components may make the rest of one."""
        found = np.zeros((self.components + 1, len(self.groups)), np.bool_)
        found[slice(None) if self.fewer else 0, -1] = True
        for m in range(1, self.components + 1):
            for replicas, stages in enumerate(self.stages[:m], start=1):
                found[m] |= stages[:, found[m - replicas]].any(axis=1)
        return found

    def inside(self) -> Iterator[_Subrange]:
        """What pipelines there may be inside the stages: those of all that begin after as many
        components and have as many are one piece.
        """
        for replicas, stages in enumerate(self.stages, start=1):
            inner = np.full((1, len(self.groups)), replicas * self.piece.within)
            for before in range(self.components + 1 - replicas):
                after = self._after[self.components - before - replicas]
                ways = stages & self._before[before][:, None] & after
                starts, ends = ways.any(axis=1), ways.any(axis=0)
                if not starts.any():
                    continue
                # By the slope that costs have at most: from here down to what the piece may take.
                over = min(
                    (self._costs(inner, start)[replicas - 1][ways[start]] - self.piece.within).min()
                    for start in np.flatnonzero(starts).tolist()
                )
                most = replicas * (self.piece.within - over) * (1 + TIE)
                members = self.groups.members
                yield _Subrange(self.piece.level - 1, members(starts), members(ends), float(most))

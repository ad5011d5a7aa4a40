"""Which cuts a plan may have that takes less than a given time: no other needs to be searched.

Cuts that are alike are put into one group, and a stage between two groups is costed at the least
that any stage between their members can be: the least compute and parameters, the fewest bytes, and
nested if any might be. A group through which no pipeline of such stages passes holds no cut of a
plan of interest, and is dropped. The others are divided into smaller groups, until each cut is its
own or little more can be dropped.
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
from pipedream.optimizer.cost import CostModel, Work
from pipedream.optimizer.cuts import Cuts
from pipedream.optimizer.hierarchy import TIE, Rules
from pipedream.optimizer.kinds import Kinds
from pipedream.optimizer.planning import Floats, Ints
from pipedream.optimizer.stage_cost import Bools, levels

# Entries of the tables of stages, which sets how many groups there may be, and the most of those.
_CELLS, _MOST = 1.6e7, 1_000


@dataclass(frozen=True)
class Question:
    """Plans of which cluster, by which model and rules, and the seconds that they take less than.

    Neither a limit of memory nor recomputation makes any plan faster: they need not be known.
    """

    cluster: Cluster
    model: CostModel
    rules: Rules
    within: float


def survivors(cuts: Cuts, question: Question, enough: int) -> Ints:
    """The states, but for the first and the last, that plans of interest may cut at, in order.

    As few as can be shown in a few rounds, or not many more than `enough`. If there are none, no
    plan of more than one stage is of interest.
    """
    alive: Ints = np.arange(1, len(cuts) - 1)
    before = np.inf
    while len(alive) and len(alive) < 0.8 * before:
        before = len(alive)
        groups = _Groups.of(cuts, alive, question)
        group = groups.of_states(alive)
        passed = _Passage(groups, question).passed()[:, group]
        alive = alive[(passed & _in_time(cuts.seconds[alive], cuts.seconds[-1], question)).any(0)]
        if len(alive) <= enough and before <= groups.most:
            break
    return alive


@dataclass(frozen=True)
class _Groups:
    """Groups of cuts, the empty one alone in the first, the whole graph alone in the last.

    `held_by_all` and `held_by_any`: [group, word], nodes that are before all cuts or any.
    """

    states: tuple[Ints, ...]
    most: int
    seconds: tuple[Floats, Floats]
    parameters: tuple[Floats, Floats]
    bytes_across: Floats
    held_by_all: NDArray[np.uint64]
    held_by_any: NDArray[np.uint64]

    @staticmethod
    def of(cuts: Cuts, alive: Ints, question: Question) -> _Groups:
        cluster = question.cluster
        most = int(min(_MOST, (_CELLS / sum(cluster.machines)) ** 0.5))
        bandwidth = cluster.bandwidth[-1]
        alike = cuts.seconds, cuts.parameter_bytes / bandwidth, cuts.bytes_across / bandwidth
        ends = np.array([0]), np.array([len(cuts) - 1])
        states = ends[0], *_alike(np.column_stack(alike), alive, most), ends[1]
        order = np.concatenate(states)
        first = np.cumsum([0, *map(len, states[:-1])])

        def over(join: np.ufunc, values: NDArray[Any]) -> NDArray[Any]:
            return np.asarray(join.reduceat(values[order], first, axis=0))

        return _Groups(
            states,
            most,
            (over(np.minimum, cuts.seconds), over(np.maximum, cuts.seconds)),
            (over(np.minimum, cuts.parameter_bytes), over(np.maximum, cuts.parameter_bytes)),
            over(np.minimum, cuts.bytes_across),
            over(np.bitwise_and, cuts.words),
            over(np.bitwise_or, cuts.words),
        )

    def __len__(self) -> int:
        return len(self.states)

    def of_states(self, states: Ints) -> Ints:
        """The group of each of these states, which are all there are but the first and the last."""
        sizes = list(map(len, self.states))
        order = np.argsort(np.concatenate(self.states), kind="stable")
        found: Ints = np.repeat(np.arange(len(self)), sizes)[order][1:-1]
        assert len(found) == len(states)
        return found

    @cached_property
    def nested(self) -> Bools:
        """[start, end]: whether some cut of the one may be inside another cut of the other."""
        found = self.seconds[0][:, None] <= self.seconds[1]
        found &= self.parameters[0][:, None] <= self.parameters[1]
        for inside, outside in zip(self.held_by_all.T, ~self.held_by_any.T, strict=True):
            found &= (inside[:, None] & outside) == 0
        np.fill_diagonal(found, [len(states) > 1 for states in self.states])
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

    add(states)
    while len(heap) < most and heap[0][0] < 0:
        *_, widest, group = heapq.heappop(heap)
        values = figures[group, widest]
        low, high = values.min(), values.max()
        middle = low + (high - low) / 2
        first = values <= (middle if middle < high else low)
        add(group[first])
        add(group[~first])
    return (group for *_, group in heap)


def _in_time(seconds: Floats, whole: float, question: Question) -> Bools:
    """[m, cut]: whether m components of the outermost level may do in time what is before the cut,
    and the others what is after it: by any cost model a stage on m takes an m-th of its time.
    """
    cluster = question.cluster
    inside = prod(cluster.machines[:-1]) * Kinds.of(cluster).fastest
    before = np.arange(cluster.machines[-1] + 1)[:, None]
    most = question.within * inside * (1 + TIE)
    found: Bools = seconds <= before * most
    found &= whole - seconds <= before[::-1] * most
    return found


class _Passage:
    """Which groups are passed by pipelines that take less than the question says."""

    def __init__(self, groups: _Groups, question: Question) -> None:
        self.groups = groups
        self.model = question.model
        self.components = question.cluster.machines[-1]
        self.replicas = np.arange(1, 2 if question.rules.straight else self.components + 1)
        self.fewer = question.rules.fewer_machines
        self.within = question.within * (1 - TIE)
        self.level = levels(question.cluster)[-1]
        inside = prod(question.cluster.machines[:-1])
        self.share = inside * Kinds.of(question.cluster).fastest
        self.stages = self._stages()

    def passed(self) -> Bools:
        """[m, group]: whether a pipeline of the whole model cuts there, with m components before."""
        return self._before() & self._after()[::-1]

    def _before(self) -> Bools:
        """[m, group]: whether m components may make a pipeline that ends there."""
        found = np.zeros((self.components + 1, len(self.groups)), np.bool_)
        found[0, 0] = True
        for m in range(1, self.components + 1):
            for replicas, stages in zip(self.replicas[:m], self.stages, strict=False):
                found[m] |= stages[found[m - replicas]].any(axis=0)
        return found

    def _after(self) -> Bools:
        """[m, group]: whether m components may make the rest of one."""
        found = np.zeros((self.components + 1, len(self.groups)), np.bool_)
        found[0 if not self.fewer else slice(None), -1] = True
        for m in range(1, self.components + 1):
            for replicas, stages in zip(self.replicas[:m], self.stages, strict=False):
                found[m] |= stages[:, found[m - replicas]].any(axis=1)
        return found

    def _stages(self) -> Bools:
        """[replicas - 1, start, end]: whether such a stage may take less than the question says."""
        groups = self.groups
        nested, across = groups.nested, groups.bytes_across
        found = np.empty((len(self.replicas), len(groups), len(groups)), np.bool_)
        for start in range(len(groups)):
            seconds = np.maximum(groups.seconds[0] - groups.seconds[1][start], 0.0) / self.share
            parameters = np.maximum(groups.parameters[0] - groups.parameters[1][start], 0.0)
            work = Work(seconds[None], parameters, float(across[start]), across)
            terms = self.model.terms(work, self.level, self.replicas[:, None], first=start == 0)
            found[:, start] = (self.model.seconds(terms) < self.within) & nested[start]
        return found

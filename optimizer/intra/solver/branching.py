"""Branch and bound over labels, where messages alone prove no more (Land and Doig, 1960).

A bound by messages is that of a linear program, whose best solution may mix labels around a loop:
such as that of an embedding's parameter, the forward pass that reads it and the gradient that must
be given as it is. In a model of many equal layers such a loop is one spot of the whole, and what
the best known labels take more than the bound (`Messages.excess`) is found there. So a variable at
that spot is decided, each of its labels in a problem of its own, a node. Its messages begin with
those of the node before, and only those near the variable change: they are passed in the part of
the problem around it, then, if that does not decide the node, in larger ones.

    while the node with the least bound is below the best labels:
        pass its messages in the next larger part; in all of it, and not settled: decide a variable

"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from time import monotonic

import numpy as np

from pipedream.optimizer.intra.solver.messages import Messages
from pipedream.optimizer.intra.solver.problem import TIE, Ints, Problem
from pipedream.optimizer.intra.solver.relaxed import Relaxed

_PART = 400
"""Variables of the first part around one that was decided."""

_LARGER = 4
"""Times as many in the next one."""

_SWEEPS = 10
"""In each step."""

_FEW = 4
"""Labels: so many may be left for one to be decided before messages have settled."""

_SLOW, _STALLED = 0.5, 0.02
"""Of what a bound misses: where a step gains less a variable is decided, if it is missed at one
spot; in any case.
"""


@dataclass(order=True)
class _Node:
    """`decided`: variables. `decision`: the last one's label, if the messages are still those of
    the node before. `size`: of the part in which messages are passed next; `proved`: their bound.
    """

    bound: float
    number: int
    relaxed: Relaxed = field(compare=False)
    proved: float = field(compare=False)
    decided: tuple[int, ...] = field(default=(), compare=False)
    decision: tuple[int, int] | None = field(default=None, compare=False)
    size: int = field(default=0, compare=False)
    is_split: bool = field(default=False, compare=False)
    """Whether a variable is decided next."""


@dataclass
class Branching:
    """The nodes of a problem. `best`: seconds of the best labels that are known."""

    problem: Problem
    best: float
    until: float
    sweeps: int = 0
    _heap: list[_Node] = field(default_factory=list)
    _made: int = 0

    def begin(self, relaxed: Relaxed) -> bool:
        """Decides a variable. Returns whether few of its labels are left by messages near it; if
        not it is better to know more before one is decided.
        """
        nodes, left = self._split(_Node(relaxed.bound, 0, relaxed, relaxed.bound)), list[_Node]()
        heapq.heapify(nodes)
        while nodes and len(left) <= _FEW and monotonic() < self.until:
            node = heapq.heappop(nodes)
            if self._is_open(node) and self._is_for_all(node):
                left.append(node)
            elif self._is_open(node):
                self._pass_near(node)
                heapq.heappush(nodes, node)
        self._heap = [*left, *nodes]
        heapq.heapify(self._heap)
        return len(left) <= _FEW

    def run(self) -> float:
        """Seconds that no choice takes less than."""
        heap = self._heap
        while heap and self._is_open(heap[0]) and monotonic() < self.until:
            # bound of all = least of the bounds of nodes, of which each choice is in one
            for node in self._next(heapq.heappop(heap)):
                if self._is_open(node):
                    heapq.heappush(heap, node)
        return min([self.best, *(node.bound for node in heap[:1])])

    def _is_open(self, node: _Node) -> bool:
        return node.bound < self.best * (1 - TIE)

    def _is_for_all(self, node: _Node) -> bool:
        """Whether the next part would be nearly everything."""
        return node.size * _LARGER >= len(self.problem.seconds)

    def _next(self, node: _Node) -> list[_Node]:
        if node.is_split:
            return self._split(node)
        if self._is_for_all(node):
            self._pass(node)
        else:
            self._pass_near(node)
        return [node]

    def _pass_near(self, node: _Node) -> None:
        """Passes messages in a part around what was decided last."""
        relaxed = node.relaxed
        labels, messages = relaxed.labels, relaxed.messages
        assert labels is not None
        part = messages.part(self._around(node.decided[-1], node.size))
        bound, taken = messages.bound(part), messages.taken(labels, part)
        messages = self._decide(node)
        messages.sweep(_SWEEPS, part)
        self.sweeps += _SWEEPS
        node.size *= _LARGER
        node.proved += messages.bound(part) - bound
        node.bound = max(node.bound, node.proved)
        if self._is_open(node):
            relaxed.labels = messages.labels(part, labels)
            relaxed.taken += messages.taken(relaxed.labels, part) - taken
            if relaxed.taken < self.best:
                self.best = min(self.best, relaxed.try_(relaxed.original(relaxed.labels)))

    def _pass(self, node: _Node) -> None:
        """Passes messages everywhere."""
        relaxed, before = node.relaxed, node.bound
        self._decide(node).sweep(_SWEEPS)
        self.sweeps += _SWEEPS
        relaxed.bound, relaxed.seconds = node.bound, self.best
        relaxed.labels, relaxed.taken = None, inf
        relaxed.improve(TIE)
        node.bound = node.proved = relaxed.bound
        self.best = relaxed.seconds
        misses = self.best - node.bound
        slow = node.bound - before < _SLOW * misses
        node.is_split = slow and (
            node.bound - before < _STALLED * misses or relaxed.misses_one_spot()
        )

    def _decide(self, node: _Node) -> Messages:
        relaxed = node.relaxed
        if node.decision is not None:
            relaxed.messages = relaxed.messages.decided(*node.decision)
            node.decision = None
        return relaxed.messages

    def _split(self, node: _Node) -> list[_Node]:
        """Nodes for the labels of one more variable: of those where the node's labels are the
        furthest above its bound the one with the fewest.
        """
        messages = node.relaxed.messages
        if node.relaxed.labels is None:  # none that is possible was found
            node.relaxed.labels = messages.labels()
        least = messages.least()
        alive = messages.alive(least, self.best)
        variable = min(self._worst(node), key=lambda v: len(alive[v]))
        decided, first = (*node.decided, variable), messages.variables.first[variable]
        nodes = list[_Node]()
        for label in map(int, alive[variable]):
            self._made += 1
            bound = max(node.bound, float(least[first + label]))
            relaxed = replace(node.relaxed, narrows=True)
            own = bound, self._made, relaxed, node.proved, decided, (variable, label), _PART
            nodes.append(_Node(*own))
        return nodes

    def _worst(self, node: _Node) -> list[int]:
        """The variables that are not decided at the worst of all factors that have such."""
        messages, labels = node.relaxed.messages, node.relaxed.labels
        assert labels is not None
        own, joint = messages.excess(labels)
        own[list(node.decided)] = -inf
        for factor in np.argsort(-joint):
            free = [v for v in map(int, messages.members(int(factor))) if own[v] > -inf]
            if free and joint[factor] >= own.max():
                return free
        return [int(np.argmax(own))]

    def _around(self, variable: int, size: int) -> Ints:
        """So many variables, the nearest first."""
        near, seen = [variable], {variable}
        for v in near:
            for number in self._values[v]:
                value = self.problem.values[number]
                for w in (value.source, *value.readers):
                    if w not in seen:
                        seen.add(w)
                        near.append(w)
            if len(near) >= size:
                break
        return np.array(near[:size], dtype=np.intp)

    @cached_property
    def _values(self) -> list[list[int]]:
        """Of each variable."""
        own: list[list[int]] = [[] for _ in self.problem.seconds]
        for number, value in enumerate(self.problem.values):
            for v in (value.source, *value.readers):
                own[v].append(number)
        return own

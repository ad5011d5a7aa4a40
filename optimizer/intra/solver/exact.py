"""The best labels of a problem, with a proof of how good they are.

0. If it has equal layers: the best labels that are the same for all of these (`ties`). They are a
   choice of the whole problem, and the messages that prove them best a good start for it.
1. Message passing bounds all choices from below.
2. Labels that the bound has nothing against, or next to nothing, are few enough for elimination,
   which finds the best among them: a good choice, often the best.
3. Labels that may be in something better than that are those whose own bound is below it. The best
   among these, by elimination, is the best of all. Where its tables would be too large, more
   messages are passed, in the problem that has only these labels (`narrowing`); at the end a small
   rest is left to HiGHS.

A limit of bytes enters by a price of a byte: for any price p >= 0 the least seconds + p (bytes -
limit) is a lower bound (Everett, 1963), and the best price is found by bisection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

import numpy as np

from pipedream.optimizer.intra.solver.elimination import eliminate
from pipedream.optimizer.intra.solver.integer import column_count, integer_program
from pipedream.optimizer.intra.solver.messages import Messages
from pipedream.optimizer.intra.solver.narrowing import narrow
from pipedream.optimizer.intra.solver.problem import Floats, Ints, Problem
from pipedream.optimizer.intra.solver.ties import tie

TIE = 1e-9
"""Relative difference below which two sums are equal."""

_SWEEPS = 20
"""Each time, before the bound is used."""

_FEWER_SWEEPS = 10
"""The same, where the messages begin with those of tied layers."""

_MOST_SWEEPS = 2000

_MUCH_SMALLER = 0.5
"""Of the variables of a problem, so many may be left for ties to be of use."""

_OF_THE_TIME = 0.3
"""For tied layers at most."""

_NOTHING_AGAINST = 1e-6
"""Labels whose bound is above the bound of all by no more than this part of it are tried."""

_SETTLED = 2e-4
"""Relative gain of the bound below which that is worth it."""

_FEWER = 0.95
"""Elimination is tried again once this part of the labels that were too many is left."""

_NARROWED = 0.8
"""Messages are passed in a smaller problem once this part of the labels is left."""

_STALLED = 1e-12
"""Relative gain of the bound below which more sweeps are not worth it."""

_FEW_COLUMNS = 20_000
"""Of an integer program that may be solved in some seconds."""

_PRICES = 16
"""Prices of a byte that are tried."""

_DEAREST = 5
"""Prices, each eight times the one before, until one is high enough."""

_CLOSE = 1e-3
"""At prices on the way a choice this near its bound will do."""


@dataclass(frozen=True)
class Choice:
    """`labels`: of each variable; None if none keeps the limit of bytes. `bound`: seconds that no
    choice takes less than; `sweeps`: of message passing, in all. `tied`: of the problem in which
    equal layers have equal labels, if there are enough of them.
    """

    labels: Ints | None
    seconds: float
    bound: float
    sweeps: int
    tied: Choice | None = None

    @property
    def proven(self) -> bool:
        """Whether nothing is better."""
        return self.seconds <= self.bound * (1 + TIE) + 1e-30


def solve(problem: Problem, seconds: float = 30.0) -> Choice:
    """The best choice found in about so many seconds."""
    return _Search(problem, monotonic() + seconds).run()


class _Search:
    def __init__(self, problem: Problem, until: float, narrows: bool = True) -> None:
        self.problem, self.until = problem, until
        self.narrows = narrows and problem.limit is None
        self.best: Ints | None = None
        self.seconds, self.bound, self.sweeps = inf, -inf, 0
        self.messages = Messages.of(problem)
        """At no price."""
        self.tied: Choice | None = None

    def run(self) -> Choice:
        few = self._begin_tied()
        priced = self._pass(self.messages, TIE, _FEWER_SWEEPS if few else _SWEEPS)
        if self.problem.limit is not None and not self._choice().proven:
            priced = self._bisect(priced)
        if not self._choice().proven:
            self._finish(priced)
        return self._choice()

    def _choice(self) -> Choice:
        bound = min(self.bound, self.seconds)
        return Choice(self.best, self.seconds, bound, self.sweeps, self.tied)

    def _begin_tied(self) -> bool:
        """Begins with the best labels of tied layers and their messages, if there are any."""
        if not self.problem.kinds:
            return False
        joined = tie(self.problem)
        if len(joined.problem.seconds) > _MUCH_SMALLER * len(self.problem.seconds):
            return False
        until = monotonic() + _OF_THE_TIME * (self.until - monotonic())
        search = _Search(joined.problem, until, narrows=False)  # its messages are for all labels
        self.tied = search.run()
        if self.tied.labels is not None:
            self.try_(joined.expanded(self.tied.labels), 0.0)
        self.messages.continue_from_joined(joined, search.messages)
        return True

    def _at_price(self, price: float, before: Messages, close: float) -> _Priced:
        messages = Messages.of(self.problem, price)
        messages.continue_from(before)
        return self._pass(messages, close, _SWEEPS)

    def _pass(self, messages: Messages, close: float, sweeps: int) -> _Priced:
        """Passes messages and looks for choices, until the best is as close to the bound."""
        priced, least, most = _Priced(self, messages), -inf, self.sweeps + _MOST_SWEEPS
        while True:
            priced.messages.sweep(sweeps)
            self.sweeps += sweeps
            priced.improve(close)
            stalled = priced.bound <= least + _STALLED * abs(least) or self.sweeps >= most
            least = priced.bound
            if priced.is_within(close) or stalled or monotonic() > self.until:
                return priced

    def try_(self, labels: Ints, price: float) -> float:
        """Remembers the labels if they are the best within the limit; their priced seconds."""
        seconds, held = self.problem.amounts(labels)
        limit = self.problem.limit
        if seconds < self.seconds and (limit is None or held <= limit):
            self.best, self.seconds = labels, seconds
        return seconds + price * held

    def raise_bound(self, priced: float, price: float) -> None:
        """Takes note of what no choice takes less than, bytes by their price."""
        self.bound = max(self.bound, priced - price * (self.problem.limit or 0.0))

    def _bisect(self, priced: _Priced) -> _Priced:
        """Finds the price at which the best choice just keeps the limit, and of all that it tries
        gives the one with the best bound.
        """
        limit = self.problem.limit
        assert limit is not None
        seconds, held = self.problem.amounts(priced.messages.labels())
        low, high = 0.0, max(seconds, 1e-12) / max(held, 1.0)
        found, best, known = priced, self.bound, False
        for step in range(_PRICES):
            price = (low + high) / 2 if known else high
            priced = self._at_price(price, priced.messages, _CLOSE)
            if self.bound > best:
                found, best = priced, self.bound
            fits = self.problem.amounts(priced.messages.labels()).bytes <= limit
            known = known or fits or step > _DEAREST
            if fits:
                high = price
            else:
                low, high = price, high if known else 8 * price
            near = self.seconds <= self.bound * (1 + TIE) or high - low < 1e-3 * high
            if monotonic() > self.until or (known and near):
                break
        return found

    def _finish(self, priced: _Priced) -> None:
        """Leaves to an integer program what the bound does not rule out, if that is little."""
        discount = priced.price * (self.problem.limit or 0.0)
        alive = priced.alive(priced.messages.least(), self.seconds + discount)
        left = priced.messages.problem.restricted(alive)
        remaining = self.until - monotonic()
        if column_count(left) <= _FEW_COLUMNS and remaining > 0:
            solution = integer_program(left, remaining)
            if solution.labels is not None:
                self.try_(priced.original(_original(alive, solution.labels)), 0.0)
            self.bound = max(self.bound, min(solution.bound, self.seconds))


@dataclass
class _Priced:
    """The best choice so far at one price, and its bound. `left`: of each variable the labels that
    `messages` are of, None for all.
    """

    search: _Search
    messages: Messages
    seconds: float = inf
    bound: float = -inf
    too_many: float = inf
    """So many labels were too many for elimination."""
    left: list[Ints] | None = None

    def __post_init__(self) -> None:
        if self.price == 0.0 and self.search.problem.limit is None:
            self.seconds = self.search.seconds  # of what is known already

    @property
    def price(self) -> float:
        return self.messages.price

    def is_within(self, close: float) -> bool:
        return self.seconds <= self.bound * (1 + close) + 1e-30

    def improve(self, close: float) -> None:
        before = self.bound
        self._raise(self.messages.bound())
        if self.is_within(close):
            return
        self._try(self.messages.labels())
        if self.is_within(close) or self.bound - before > _SETTLED * abs(before):
            return
        least = self.messages.least()
        self._eliminate(self.alive(least, self.bound * (1 + _NOTHING_AGAINST)))
        if self.is_within(close):
            return
        alive = self.alive(least, self.seconds)
        if self._eliminate(alive):
            self._raise(self.seconds)
        elif self.search.narrows and _count(alive) < _NARROWED * len(least):
            self._narrow(alive)

    def alive(self, least: Floats, most: float) -> list[Ints]:
        """The labels of each variable whose bound is at most so many priced seconds, but at least
        that of the lowest. `least`: as `Messages.least` gives it.
        """
        ends = np.cumsum([len(own) for own in self.messages.problem.seconds])[:-1]
        most *= 1 + TIE
        return [np.flatnonzero(own <= max(most, own.min())) for own in np.split(least, ends)]

    def original(self, labels: Ints) -> Ints:
        """In the whole problem."""
        return labels if self.left is None else _original(self.left, labels)

    def _narrow(self, alive: Sequence[Ints]) -> None:
        """Goes on without labels that are in nothing better."""
        narrowed = narrow(self.messages.problem, alive)
        messages = Messages.of(narrowed.problem, self.price)
        messages.continue_from_narrowed(narrowed, self.messages)
        self.messages = messages
        if self.left is None:
            self.left = list(alive)
        else:
            self.left = [own[kept] for own, kept in zip(self.left, alive, strict=True)]

    def _eliminate(self, alive: Sequence[Ints]) -> bool:
        """Finds the best among these labels; returns whether it could."""
        if _count(alive) > _FEWER * self.too_many:
            return False
        labels = eliminate(self.messages.problem.restricted(alive), self.price)
        if labels is None:
            self.too_many = _count(alive)
            return False
        self._try(_original(alive, labels))
        return True

    def _try(self, labels: Ints) -> None:
        self.seconds = min(self.seconds, self.search.try_(self.original(labels), self.price))

    def _raise(self, bound: float) -> None:
        """Takes note of a bound of the labels that are left; no others are in anything better."""
        self.bound = max(self.bound, min(bound, self.seconds))
        self.search.raise_bound(self.bound, self.price)


def _count(alive: Sequence[Ints]) -> int:
    return sum(map(len, alive))


def _original(alive: Sequence[Ints], labels: Ints) -> Ints:
    return np.array([own[label] for own, label in zip(alive, labels, strict=True)], dtype=np.intp)

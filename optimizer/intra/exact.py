"""The best labels of a problem, with a proof of how good they are.

1. Message passing bounds all choices from below and finds good ones.
2. A label that the bound rules out beside the best choice so far is dropped.
3. What is left is solved exactly by elimination where its tables are small, else by HiGHS for as
   long as there is time.

A limit of bytes enters by a price of a byte: for any price p >= 0 the least seconds + p (bytes -
limit) is a lower bound (Everett, 1963), and the best price is found by bisection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

import numpy as np

from pipedream.optimizer.intra.elimination import eliminate
from pipedream.optimizer.intra.integer import integer_program
from pipedream.optimizer.intra.messages import Messages
from pipedream.optimizer.intra.problem import Ints, Problem

TIE = 1e-9
"""Relative difference below which two sums are equal."""

_SWEEPS = 10
"""Between two looks at the bound."""

_STALLED = 1e-6
"""Relative gain of so many sweeps below which more are not worth it."""

_PRICES = 24
"""Prices of a byte that are tried."""

_DEAREST = 5
"""Prices, each eight times the one before, until one is high enough."""

_CLOSE = 1e-3
"""At prices on the way a choice this near its bound will do."""


@dataclass(frozen=True)
class Choice:
    """`labels`: of each variable; None if none keeps the limit of bytes. `bound`: seconds that no
    choice takes less than; `sweeps`: of message passing, in all.
    """

    labels: Ints | None
    seconds: float
    bound: float
    sweeps: int

    @property
    def proven(self) -> bool:
        """Whether nothing is better."""
        return self.seconds <= self.bound * (1 + TIE) + 1e-30


def solve(problem: Problem, seconds: float = 30.0) -> Choice:
    """The best choice found in about so many seconds."""
    return _Search(problem, monotonic() + seconds).run()


class _Search:
    def __init__(self, problem: Problem, until: float) -> None:
        self.problem, self.until = problem, until
        self.best: Ints | None = None
        self.seconds, self.bound, self.sweeps = inf, -inf, 0

    def run(self) -> Choice:
        problem = self.problem
        at_nothing = self._at_price(0.0, None, TIE)
        if problem.limit is not None and self.seconds == inf:
            messages = self._bisect(at_nothing)
        else:
            messages = at_nothing, 0.0
        if not self._choice().proven:
            self._finish(*messages)
        return self._choice()

    def _choice(self) -> Choice:
        bound = min(self.bound, self.seconds)
        return Choice(self.best, self.seconds, bound, self.sweeps)

    def _at_price(self, price: float, before: Messages | None, close: float) -> Messages:
        """Passes messages until the bound meets the best choice, or stands still."""
        messages = Messages.of(self.problem, price)
        if before is not None:
            messages.continue_from(before)
        discount = price * (self.problem.limit or 0.0)
        least, priced = -inf, inf
        while True:
            messages.sweep(_SWEEPS)
            self.sweeps += _SWEEPS
            raised = messages.bound()
            self.bound = max(self.bound, raised - discount)
            priced = min(priced, self._try(messages.labels(), price))
            done = priced <= raised * (1 + close) or raised <= least + _STALLED * abs(raised)
            least = max(least, raised)
            if done or monotonic() > self.until:
                return messages

    def _try(self, labels: Ints, price: float) -> float:
        """Remembers the labels if they are the best within the limit; their priced seconds."""
        seconds, held = self.problem.amounts(labels)
        limit = self.problem.limit
        if seconds < self.seconds and (limit is None or held <= limit):
            self.best, self.seconds = labels, seconds
        self.last = seconds, held
        return seconds + price * held

    def _bisect(self, messages: Messages) -> tuple[Messages, float]:
        """Finds the price at which the best choice just keeps the limit: the messages and the price
        of the best bound.
        """
        limit = self.problem.limit
        assert limit is not None
        seconds, held = self.last
        low, high = 0.0, max(seconds, 1e-12) / max(held, 1.0)
        found, best, known = (messages, 0.0), self.bound, False
        for step in range(_PRICES):
            price = (low + high) / 2 if known else high
            messages = self._at_price(price, messages, _CLOSE)
            if self.bound > best:
                found, best = (messages, price), self.bound
            known = known or self.last[1] <= limit or step > _DEAREST
            if self.last[1] <= limit:
                high = price
            else:
                low, high = price, high if known else 8 * price
            near = self.seconds <= self.bound * (1 + TIE) or high - low < 1e-3 * high
            if monotonic() > self.until or (known and near):
                break
        return found

    def _finish(self, messages: Messages, price: float) -> None:
        """Solves exactly what the bound does not rule out."""
        problem, limit = self.problem, self.problem.limit
        discount = price * (limit or 0.0)
        ends = np.cumsum([len(own) for own in problem.seconds])[:-1]
        least = np.split(messages.least() - discount, ends)
        alive = [np.flatnonzero(own <= self.seconds * (1 + TIE)) for own in least]
        if not all(len(own) for own in alive):  # rounding: the best choice is the best
            self.bound = self.seconds
            return
        left = problem.restricted(alive)
        if limit is None:
            labels = eliminate(left)
            if labels is not None:
                self._try(_original(alive, labels), 0.0)
                self.bound = self.seconds
                return
        remaining = self.until - monotonic()
        if remaining > 0:
            solution = integer_program(left, remaining)
            if solution.labels is not None:
                self._try(_original(alive, solution.labels), 0.0)
            self.bound = max(self.bound, min(solution.bound, self.seconds))


def _original(alive: Sequence[Ints], labels: Ints) -> Ints:
    return np.array([own[label] for own, label in zip(alive, labels, strict=True)], dtype=np.intp)

"""The best labels of a problem, with a proof of how good they are.

0. If it has equal layers: the best labels that are the same for all of these (`ties`). They are a
   choice of the whole problem, and the messages that prove them best a good start for it.
1. Message passing bounds all choices from below.
2. Elimination finds the best among the labels that it leaves (`relaxed`).
3. Where messages prove no more, or all that they miss is in one spot, a variable is decided there,
   each of its labels in a problem of its own (`branching`).

A limit of bytes enters by a price of a byte: for any price p >= 0 the least seconds + p (bytes -
limit) is a lower bound (Everett, 1963), and the best price is found by bisection; at the end a
small rest is left to HiGHS.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from time import monotonic

from pipedream.optimizer.intra.solver.branching import Branching
from pipedream.optimizer.intra.solver.integer import column_count, integer_program
from pipedream.optimizer.intra.solver.messages import Messages
from pipedream.optimizer.intra.solver.problem import TIE, Ints, Problem, expanded
from pipedream.optimizer.intra.solver.relaxed import Relaxed
from pipedream.optimizer.intra.solver.ties import tie

_SWEEPS = 20
"""Each time, before the bound is used."""

_FEWER_SWEEPS = 10
"""The same, where the messages begin with those of tied layers."""

_MOST_SWEEPS = 2000

_MUCH_SMALLER = 0.5
"""Of the variables of a problem, so many may be left for ties to be of use."""

_OF_THE_TIME = 0.3
"""For tied layers at most."""

_SLOW, _STALLED = 0.5, 0.02
"""Gain of the bound, as a part of what it misses: below which it is looked whether that is at one
spot; below which more sweeps are not worth it.
"""

_NOTHING = 1e-12
"""Relative gain of the bound below which no more sweeps are passed in any case."""

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
        self.branching: Branching | None = None
        self.missed = inf
        """By the bound, when it was tried to decide a variable."""

    def run(self) -> Choice:
        few = self._begin_tied()
        relaxed = self._pass(self.messages, TIE, _FEWER_SWEEPS if few else _SWEEPS)
        if self.problem.limit is None and not self._choice().proven:
            self._branch(relaxed)
        elif not self._choice().proven:
            self._finish(self._bisect(relaxed))
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

    def _at_price(self, price: float, before: Messages, close: float) -> Relaxed:
        messages = Messages.of(self.problem, price)
        messages.continue_from(before)
        return self._pass(messages, close, _SWEEPS)

    def _pass(self, messages: Messages, close: float, sweeps: int) -> Relaxed:
        """Passes messages and looks for choices, until the best is as close to the bound, or
        deciding a variable promises more.
        """
        relaxed = Relaxed(messages, partial(self.try_, price=messages.price), self.narrows)
        if self.best is not None and self.problem.limit is None:
            relaxed.labels, relaxed.taken, relaxed.seconds = self.best, self.seconds, self.seconds
        most = self.sweeps + _MOST_SWEEPS
        while True:
            before = relaxed.bound
            relaxed.messages.sweep(sweeps)
            self.sweeps += sweeps
            relaxed.improve(close)
            self.raise_bound(relaxed.bound, relaxed.price)
            over = self.sweeps >= most or monotonic() > self.until
            if relaxed.is_within(close) or over or self._has_stalled(relaxed, before):
                return relaxed
            if self._is_slow(relaxed, before) and self._decides(relaxed):
                return relaxed

    def _has_stalled(self, relaxed: Relaxed, before: float) -> bool:
        gained = relaxed.bound - before
        if self.problem.limit is not None or not isfinite(relaxed.seconds):
            return gained <= _NOTHING * abs(before)  # nothing else would raise the bound
        return gained < _STALLED * (relaxed.seconds - relaxed.bound)

    def _is_slow(self, relaxed: Relaxed, before: float) -> bool:
        """Whether more sweeps may not do, and the bound has come much nearer since a variable was
        to be decided last.
        """
        misses = relaxed.seconds - relaxed.bound
        near = self.problem.limit is None and misses < _SLOW * self.missed
        return near and relaxed.bound - before < _SLOW * misses

    def _decides(self, relaxed: Relaxed) -> bool:
        """Decides a variable, if what messages miss is at one spot, and that helps."""
        if not relaxed.misses_one_spot():
            return False
        self.missed = relaxed.seconds - relaxed.bound
        self.branching = Branching(self.problem, relaxed.seconds, self.until)
        helps = self.branching.begin(relaxed)
        relaxed.seconds = self.branching.best
        if not helps:
            self.sweeps += self.branching.sweeps
            self.branching = None
        return helps

    def _branch(self, relaxed: Relaxed) -> None:
        branching = self.branching
        if branching is None:
            branching = Branching(self.problem, relaxed.seconds, self.until)
            branching.begin(relaxed)
        self.bound = max(self.bound, branching.run())
        self.sweeps += branching.sweeps

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

    def _bisect(self, priced: Relaxed) -> Relaxed:
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

    def _finish(self, relaxed: Relaxed) -> None:
        """Leaves to an integer program what the bound does not rule out, if that is little."""
        remaining = self.until - monotonic()
        if self._choice().proven or remaining <= 0:
            return
        messages = relaxed.messages
        most = self.seconds + relaxed.price * (self.problem.limit or 0.0)
        alive = messages.alive(messages.least(), most)
        left = messages.problem.restricted(alive)
        if column_count(left) <= _FEW_COLUMNS:
            solution = integer_program(left, remaining)
            if solution.labels is not None:
                self.try_(relaxed.original(expanded(alive, solution.labels)), 0.0)
            self.bound = max(self.bound, min(solution.bound, self.seconds))

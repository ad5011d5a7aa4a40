"""What is known of a problem, or of a part of its choices, at one price of a byte: messages, their
bound, and the best labels found with them.

Labels that the bound has nothing against, or next to nothing, are few enough for elimination, which
finds the best among them: a good choice, often the best. Labels that may be in something better
than that are those whose own bound is below it. The best among these, by elimination, is the best
of all. Where its tables would be too large, messages go on in the problem that has only these
labels (`narrowing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from pipedream.optimizer.intra.solver.elimination import eliminate
from pipedream.optimizer.intra.solver.messages import Messages
from pipedream.optimizer.intra.solver.narrowing import narrow
from pipedream.optimizer.intra.solver.problem import Ints, expanded

_NOTHING_AGAINST = 1e-6
"""Labels whose bound is above the bound of all by no more than this part of it are tried."""

_SETTLED = 2e-4
"""Relative gain of the bound below which that is worth it."""

_FEWER = 0.95
"""Elimination is tried again once this part of the labels that were too many is left."""

_NARROWED = 0.8
"""Messages are passed in a smaller problem once this part of the labels is left."""

_ONE_SPOT = 0.5
"""Of what labels take more than the bound: where one factor has so much of it."""


@dataclass
class Relaxed:
    """`try_` takes note of labels of the whole problem and gives their priced seconds; `seconds`:
    of the best that are known, `bound`: of all choices that are left. `labels`: the best that were
    found with these messages, which take `taken`.
    """

    messages: Messages
    try_: Callable[[Ints], float]
    narrows: bool = True
    seconds: float = inf
    bound: float = -inf
    labels: Ints | None = None
    taken: float = inf
    too_many: float = inf
    """So many labels were too many for elimination."""
    left: Sequence[Ints] | None = None
    """Of each variable the labels that `messages` are of, None for all."""

    @property
    def price(self) -> float:
        return self.messages.price

    def is_within(self, close: float) -> bool:
        return self.seconds <= self.bound * (1 + close) + 1e-30

    def improve(self, close: float) -> None:
        """Raises the bound to that of the messages, and looks for better labels."""
        before = self.bound
        self._raise(self.messages.bound())
        if self.is_within(close):
            return
        self._try(self.messages.labels())
        if self.is_within(close) or self.bound - before > _SETTLED * abs(before):
            return
        least = self.messages.least()
        self._eliminate(self.messages.alive(least, self.bound * (1 + _NOTHING_AGAINST)))
        if self.is_within(close):
            return
        alive = self.messages.alive(least, self.seconds)
        if self._eliminate(alive):
            self._raise(self.seconds)
        elif self.narrows and _count(alive) < _NARROWED * len(least):
            self._narrow(alive)

    def misses_one_spot(self) -> bool:
        """Whether what the labels take more than the bound is for the most part in one place."""
        if self.labels is None:
            return False
        most = max(each.max(initial=0.0) for each in self.messages.excess(self.labels))
        return bool(most > _ONE_SPOT * (self.taken - self.bound))

    def original(self, labels: Ints) -> Ints:
        """In the whole problem."""
        return labels if self.left is None else expanded(self.left, labels)

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
        self.labels, self.taken = None, inf
        self._try(messages.labels())

    def _eliminate(self, alive: Sequence[Ints]) -> bool:
        """Finds the best among these labels; returns whether it could."""
        if _count(alive) > _FEWER * self.too_many:
            return False
        labels = eliminate(self.messages.problem.restricted(alive), self.price)
        if labels is None:
            self.too_many = _count(alive)
            return False
        self._try(expanded(alive, labels))
        return True

    def _try(self, labels: Ints) -> None:
        taken = self.try_(self.original(labels))
        if taken < self.taken:
            self.labels, self.taken = labels, taken
        self.seconds = min(self.seconds, taken)

    def _raise(self, bound: float) -> None:
        """Takes note of a bound of the labels that are left; no others are in anything better."""
        self.bound = max(self.bound, min(bound, self.seconds))


def _count(alive: Sequence[Ints]) -> int:
    return sum(map(len, alive))

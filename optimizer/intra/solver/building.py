"""A `Problem` as arrays for compiled code: variables with their labels, values as factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipedream.optimizer.intra.solver.factors import (
    FACTOR,
    FORBIDDEN,
    MOST_READERS,
    SLOT,
    Factors,
    Slots,
    Variables,
    Work,
)
from pipedream.optimizer.intra.solver.problem import Floats, Ints, Problem, Value

_ALL = 1e6
"""Units of cost that all together take at most."""


class Built(NamedTuple):
    """`unary`: the cost of each label, in units; `unit`: in seconds; `first_factor`: of each value,
    the next one's at the end.
    """

    variables: Variables
    slots: Slots
    factors: Factors
    unary: Floats
    work: Work
    unit: float
    first_factor: Sequence[int]


def build(problem: Problem, price: float) -> Built:
    """The problem in which a byte costs `price` seconds."""
    return _Builder(problem, price).build()


class _Builder:
    def __init__(self, problem: Problem, price: float) -> None:
        self.problem, self.price = problem, price
        self.unit = max(_most(problem, price), 1e-30) / _ALL
        self.tables: dict[tuple[object, ...], tuple[int, ...]] = {}
        self.costs: list[Floats] = []
        self.across: list[Floats] = []
        self.bases: list[Floats] = []
        self.offsets = [0, 0]
        self.members: list[int] = []
        self.turns: list[int] = []
        self.places: list[Ints] = []
        self.spans: list[int] = []
        """Of each slot its variable, pass, placements and how many messages it has."""
        self.heads: list[tuple[int, ...]] = []
        self.first, self.first_factor = [0], [0]
        """Where the slots of each factor begin, and the factors of each value."""

    def build(self) -> Built:
        for value in self.problem.values:
            self._add(value)
        return Built(
            self._variables(),
            self._slots(),
            self._factors(),
            self._unary(),
            _work(max(self.spans, default=1)),
            self.unit,
            self.first_factor,
        )

    def _add(self, value: Value) -> None:
        for readers in blocks(len(value.readers)):
            share = len(readers) / max(1, len(value.readers))
            given, wanted = value.seconds.shape
            self.members += [value.source, *(value.readers[k] for k in readers)]
            self.turns += [0, *(1 + value.backward[k] for k in readers)]
            self.places += [value.given, *(value.wanted[k] for k in readers)]
            self.spans += [given, *[wanted] * len(readers)]
            self.heads.append((given, wanted, *self._table(value, share)))
            self.first.append(len(self.members))
        self.first_factor.append(len(self.heads))

    def _variables(self) -> Variables:
        counts = np.array([len(each) for each in self.problem.seconds], dtype=np.intp)
        variable = np.array(self.members, dtype=np.intp)
        slots = np.bincount(variable, minlength=len(counts))
        order = np.argsort(variable, kind="stable")
        return Variables(_offsets(counts), _offsets(slots), order)

    def _slots(self) -> Slots:
        variable, first = (np.array(each, dtype=np.intp) for each in (self.members, self.first))
        factor = np.repeat(np.arange(len(first) - 1), np.diff(first))
        latest = np.maximum.reduceat(variable, first[:-1]) if self.heads else variable
        earliest = np.minimum.reduceat(variable, first[:-1]) if self.heads else variable
        counts = [float(value.count) for value in self.problem.values]
        weights = np.repeat(np.repeat(counts, np.diff(self.first_factor)), np.diff(first))
        heads = np.zeros(len(variable) + 1, dtype=SLOT)
        heads["factor"][:-1] = factor
        heads["turn"][:-1] = self.turns
        heads["ahead"][:-1] = np.where(latest[factor] > variable, weights, 0.0)
        heads["behind"][:-1] = np.where(earliest[factor] < variable, weights, 0.0)
        heads["place"] = _offsets([len(each) for each in self.places])
        heads["message"] = _offsets(self.spans)
        places = np.concatenate([np.zeros(0, dtype=np.intp), *self.places]).astype(np.intp)
        return Slots(heads, places, np.zeros(heads["message"][-1], dtype=np.intp))

    def _factors(self) -> Factors:
        heads = np.zeros(len(self.first), dtype=FACTOR)
        heads["first"] = self.first
        own = np.array(self.heads, dtype=np.intp).reshape(-1, 6)
        names = ("given", "wanted", "table", "base", "cases", "turns")
        for name, numbers in zip(names, own.T, strict=True):
            heads[name][:-1] = numbers
        costs = (np.concatenate([*each, [0.0]]) for each in (self.costs, self.across, self.bases))
        return Factors(heads, *costs)

    def _unary(self) -> Floats:
        seconds = np.concatenate([np.zeros(0), *self.problem.seconds])
        priced = seconds + self.price * np.concatenate([np.zeros(0), *self.problem.bytes])
        return np.minimum(priced / self.unit, FORBIDDEN)

    def _table(self, value: Value, share: float) -> tuple[int, ...]:
        """Where the costs of a factor are, and of how many cases and turns: a new table for each
        kind of value. With a price there are two cases: what was given is kept, or is not.
        """
        priced = self.price > 0 and value.keeps
        bytes_ = (id(value.given_bytes), id(value.wanted_bytes)) if priced else ()
        key = (id(value.seconds), share, priced, *bytes_)
        if key not in self.tables:
            if priced:
                costs, bases = _priced(value, self.price * share)
                costs[:, :, :, :] += share * value.seconds
            else:
                costs = share * value.seconds[None, None]
                bases = np.zeros((1, len(value.seconds)))
            self.tables[key] = (*self.offsets, *costs.shape[:2])
            self.offsets = [self.offsets[0] + costs.size, self.offsets[1] + bases.size]
            costs = np.minimum(costs / self.unit, FORBIDDEN)
            self.costs.append(costs.ravel())
            self.across.append(costs.swapaxes(2, 3).ravel())
            self.bases.append(bases.ravel() / self.unit)
        return self.tables[key]


def _priced(value: Value, price: float) -> tuple[Floats, Floats]:
    """The price of bytes: [case, turn, given, wanted] of a group and [case, given] besides.

    A group in both passes keeps its form, one in the backward pass alone needs what was given.
    """
    given, wanted = value.seconds.shape
    costs, bases = np.zeros((2, 3, given, wanted)), np.zeros((2, given))
    is_source = value.same[:, None] == np.arange(wanted)
    bases[0] = price * value.given_bytes
    costs[:, 2] = np.where(is_source, 0.0, price * value.wanted_bytes)
    costs[1, 1] = np.inf
    costs[1, 2][is_source] = np.inf
    return costs, bases


def _most(problem: Problem, price: float) -> float:
    """Seconds that no possible choice takes more than, bytes by their price."""
    priced = (own + price * held for own, held in zip(problem.seconds, problem.bytes, strict=True))
    most = sum(float(own[np.isfinite(own)].max(initial=0.0)) for own in priced)
    for value in problem.values:
        moved = float(value.seconds[np.isfinite(value.seconds)].max(initial=0.0))
        kept = float(value.given_bytes.max(initial=0.0) + value.wanted_bytes.max(initial=0.0))
        most += len(value.readers) * (moved + price * kept)
    return most


def blocks(readers: int) -> Sequence[list[int]]:
    """So many readers by factor, as evenly as can be."""
    count = -(-readers // MOST_READERS)
    return [list(map(int, each)) for each in np.array_split(np.arange(readers), max(count, 1))]


def _offsets(counts: Sequence[int] | Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.intp)


def _work(placements: int) -> Work:
    subsets = 1 << MOST_READERS
    sums, least, cover, best = (np.zeros((subsets, placements)) for _ in range(4))
    turns, out = np.zeros(subsets, dtype=np.intp), np.zeros(placements)
    return Work(sums, turns, least, cover, best, out)

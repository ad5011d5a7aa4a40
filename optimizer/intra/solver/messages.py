"""A lower bound by message passing, and good labels on the way.

Sequential reweighted message passing (Kolmogorov, "A New Look at Reweighted Message Passing", 2015;
for costs of pairs it is TRW-S, 2006) on the factor graph of a `Problem`: each value is a factor
over its source and its readers. A message is one number for each placement. Messages move costs
between variables and factors and change no sum, so at any time

    bound = sum over variables of min unary + sum over factors of min factor

is a lower bound.

Alone, such messages may take thousands of sweeps to tell one end of a model of many equal layers
what they found at the other. So each sweep begins where the changes of the last ones lead to:
Nesterov's momentum (1983), which begins anew wherever the bound falls (O'Donoghue and Candes,
"Adaptive Restart for Accelerated Gradient Schemes", 2015). No sum is changed by that either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from pipedream.optimizer.intra.solver import passing
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
from pipedream.optimizer.intra.solver.joining import Joined
from pipedream.optimizer.intra.solver.narrowing import Narrowed
from pipedream.optimizer.intra.solver.problem import TIE, Floats, Ints, Problem, Value

_ALL = 1e6
"""Units of cost that all together take at most."""


_ROUNDING = 1e-8
"""Of a bound, in units."""

_Index: TypeAlias = slice | Ints


@dataclass(frozen=True, eq=False)
class Part:
    """Variables between which messages are passed, in their order, and the factors that these are
    members of. `left`: of these factors those with a first member elsewhere: all others have sent
    on all they know after a sweep. `labels`, `messages`: where theirs are in arrays over all.
    """

    variables: Ints
    factors: Ints
    left: Ints
    labels: _Index
    messages: _Index


@dataclass(eq=False)
class Momentum:
    """Where messages stood after the last sweep and after the one before, `steps` sweeps after it
    began anew. Sweep k + 1 begins at

        messages(k) + (k - 1) / (k + 2) (messages(k) - messages(k - 1)).
    """

    part: Part
    steps: int = 0
    bound: float = -np.inf
    last: tuple[Floats, Floats] | None = None
    before: tuple[Floats, Floats] | None = None

    def begin(self, messages: Messages) -> None:
        if self.last is not None and self.before is not None:
            factor = (self.steps - 1) / (self.steps + 2)
            now = (messages.unary, self.part.labels), (messages.messages, self.part.messages)
            for (tensor, own), last, before in zip(now, self.last, self.before, strict=True):
                tensor[own] += factor * (last - before)

    def end(self, messages: Messages) -> None:
        """Takes a sweep back that led too far."""
        bound = messages._swept(self.part)
        if bound < self.bound - _ROUNDING and self.last is not None and self.before is not None:
            messages.unary[self.part.labels], messages.messages[self.part.messages] = self.last
            self.steps, self.before = 0, None
            return
        self.steps, self.bound, self.before = self.steps + 1, bound, self.last
        unary, passed = messages.unary[self.part.labels], messages.messages[self.part.messages]
        self.last = unary.copy(), passed.copy()


@dataclass(eq=False)
class Messages:
    """The messages of a problem in which a byte costs `price` seconds."""

    problem: Problem
    variables: Variables
    slots: Slots
    factors: Factors
    unary: Floats
    messages: Floats
    work: Work
    unit: float
    """In seconds."""
    price: float
    first_factor: Sequence[int]
    """Of each value; the next one's at the end."""
    momentum: Momentum | None = None
    """Of the last sweeps, if more of these may go on with it."""

    @staticmethod
    def of(problem: Problem, price: float = 0.0) -> Messages:
        return _Builder(problem, price).build()

    def sweep(self, count: int, part: Part | None = None) -> None:
        """Passes messages forward and backward so many times, in this part or everywhere. The
        bound never falls.
        """
        part = part or self.whole
        if self.momentum is None or self.momentum.part is not part:
            self.momentum = Momentum(part)
        for _ in range(count):
            self.momentum.begin(self)
            passing.sweep(True, part.variables, *self._state)
            passing.sweep(False, part.variables, *self._state)
            self.momentum.end(self)

    def bound(self, part: Part | None = None) -> float:
        """Seconds that no labels take less than, counting bytes by their price; or of them those
        of this part.
        """
        return self._bound(part or self.whole) * self.unit

    def _bound(self, part: Part) -> float:
        own, joint = passing.bounds(part.variables, part.factors, *self._state)
        return float(own.sum() + joint.sum())

    def _swept(self, part: Part) -> float:
        """The bound after a sweep."""
        own, joint = passing.bounds(part.variables, part.left, *self._state)
        return float(own.sum() + joint.sum())

    def taken(self, labels: Ints, part: Part) -> float:
        """What these labels take, in the part that the bound is of; a little less where a value has
        several factors.
        """
        own, joint = passing.costs(labels, part.variables, part.factors, *self._state)
        return float(own.sum() + joint.sum()) * self.unit

    @cached_property
    def whole(self) -> Part:
        variables, factors = len(self.variables.first) - 1, len(self.factors.heads) - 1
        none = np.zeros(0, dtype=np.intp)
        return Part(np.arange(variables), np.arange(factors), none, slice(None), slice(None))

    def part(self, variables: Ints) -> Part:
        """Of these variables."""
        chosen = np.sort(variables)
        labels, slots = self.variables.first, self.variables.first_slot
        members = self.variables.slots[_ranges(slots[chosen], slots[chosen + 1])]
        heads, first = self.slots.heads, self.factors.heads["first"]
        factors, message = np.unique(heads["factor"][members]), heads["message"]
        messages = _ranges(message[first[factors]], message[first[factors + 1]])
        elsewhere = ~np.isin(self._first_member[factors], chosen)
        own = _ranges(labels[chosen], labels[chosen + 1])
        return Part(chosen, factors, factors[elsewhere], own, messages)

    def decided(self, variable: int, label: int) -> Messages:
        """Those of the problem in which the variable has this label, for a start these."""
        slots = self.slots._replace(usable=self.slots.usable.copy())
        unary, messages = self.unary.copy(), self.messages.copy()
        passing.decide(variable, label, self.variables, slots, unary, messages)
        return replace(self, slots=slots, unary=unary, messages=messages, momentum=None)

    def excess(self, labels: Ints) -> tuple[Floats, Floats]:
        """What these labels take more than the least, of each variable and of each factor, in
        seconds: all together by how much they are above the bound.
        """
        where = self.whole.variables, self.whole.factors
        taken = passing.costs(labels, *where, *self._state)
        own, joint = map(np.subtract, taken, passing.bounds(*where, *self._state))
        return own * self.unit, joint * self.unit

    def members(self, factor: int) -> Ints:
        """The variables of a factor, its source first."""
        first = self.factors.heads["first"]
        return self._owner[first[factor] : first[factor + 1]]

    @cached_property
    def _owner(self) -> Ints:
        """The variable of each slot."""
        owner = np.zeros(len(self.variables.slots), dtype=np.intp)
        counts = np.diff(self.variables.first_slot)
        owner[self.variables.slots] = np.repeat(np.arange(len(counts)), counts)
        return owner

    @cached_property
    def _first_member(self) -> Ints:
        """Of each factor."""
        return np.minimum.reduceat(self._owner, self.factors.heads["first"][:-1])

    def labels(self, part: Part | None = None, others: Ints | None = None) -> Ints:
        """One label for each variable: in their order by what is known, then improved one by one
        until none is better. `others`: with a part, those of the variables that are not in it.
        """
        part = part or self.whole
        given = np.full(len(self.variables.first) - 1, -1) if others is None else others
        return np.asarray(passing.label(given, part.variables, *self._state))

    def least(self) -> Floats:
        """For each label a lower bound on all choices with it, in seconds; labels of one variable
        after the other.
        """
        return np.asarray(passing.least(self._bound(self.whole), *self._state)) * self.unit

    def alive(self, least: Floats, most: float) -> list[Ints]:
        """The labels of each variable whose bound is at most so many seconds, but at least that of
        the lowest. `least`: as `least` gives it.
        """
        most *= 1 + TIE
        parts = np.split(least, self.variables.first[1:-1])
        return [np.flatnonzero(own <= max(most, own.min())) for own in parts]

    @property
    def _state(self) -> tuple[Any, ...]:
        return (
            *(self.variables, self.slots, self.factors),
            *(self.unary, self.messages, self.work),
        )

    def continue_from(self, before: Messages) -> None:
        """Begins with the messages of the same problem at another price."""
        usable = self.slots.usable == 1
        self.messages[usable] = before.messages[usable] * (before.unit / self.unit)
        passing.apply(self.variables, self.slots, self.unary, self.messages)
        self.momentum = None

    def continue_from_joined(self, joined: Joined, before: Messages) -> None:
        """Begins with the messages of a problem in which variables are joined, at the same price:
        each value has its part of those of the one it has become.
        """
        ratio = before.unit / self.unit
        for number, merged in enumerate(joined.values):
            if merged is None:
                continue
            given, ends = self._ends(number)
            its_given, its_ends = before._ends(merged.value)
            count = before.problem.values[merged.value].count
            sources = np.sum([before._known(own) for own in its_given], axis=0)
            for own, readers in zip(given, _blocks(len(ends)), strict=True):
                share = len(readers) / max(1, len(ends)) / count
                self._set(own, ratio * share * sources)
            for own, place in zip(ends, merged.readers, strict=True):
                share = 1 / merged.readers.count(place) / count
                self._set(own, ratio * share * before._known(its_ends[place]))
        passing.apply(self.variables, self.slots, self.unary, self.messages)
        self.momentum = None

    def continue_from_narrowed(self, narrowed: Narrowed, before: Messages) -> None:
        """Begins with the messages of a problem of which this is what is left, at the same price:
        what they say of it stays.
        """
        ratio = before.unit / self.unit
        for number, left in enumerate(zip(narrowed.given, narrowed.wanted, strict=True)):
            sides = zip(self._ends(number), before._ends(number), left, strict=True)
            for ends, whole, own in sides:
                for here, there in zip(ends, whole, strict=True):
                    self._set(here, ratio * before._known(there)[own])
        passing.apply(self.variables, self.slots, self.unary, self.messages)
        self.momentum = None

    def _ends(self, value: int) -> tuple[list[slice], list[slice]]:
        """Where messages of a value are: of its source in each factor, and of its readers."""
        begin, sources, readers = self.slots.heads["message"], list[slice](), list[slice]()
        for f in range(self.first_factor[value], self.first_factor[value + 1]):
            first, end = self.factors.heads["first"][f : f + 2]
            sources.append(slice(begin[first], begin[first + 1]))
            readers += [slice(begin[k], begin[k + 1]) for k in range(first + 1, end)]
        return sources, readers

    def _known(self, own: slice) -> Floats:
        return np.where(self.slots.usable[own] == 1, self.messages[own], 0.0)

    def _set(self, own: slice, messages: Floats) -> None:
        self.messages[own] = np.where(self.slots.usable[own] == 1, messages, self.messages[own])


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

    def build(self) -> Messages:
        for value in self.problem.values:
            self._add(value)
        slots = self._slots()
        messages = Messages(
            self.problem,
            self._variables(),
            slots,
            self._factors(),
            self._unary(),
            np.zeros(len(slots.usable)),
            _work(max(self.spans, default=1)),
            self.unit,
            self.price,
            self.first_factor,
        )
        passing.begin(messages.variables, messages.slots, messages.unary, messages.messages)
        return messages

    def _add(self, value: Value) -> None:
        for readers in _blocks(len(value.readers)):
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


def _blocks(readers: int) -> Sequence[list[int]]:
    """Readers by factor, as evenly as can be."""
    count = -(-readers // MOST_READERS)
    return [list(map(int, each)) for each in np.array_split(np.arange(readers), max(count, 1))]


def _ranges(begin: Ints, end: Ints) -> Ints:
    """All numbers from each begin to before its end, one range after the other."""
    counts = end - begin
    return np.repeat(begin - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


def _offsets(counts: Sequence[int] | Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.intp)


def _work(placements: int) -> Work:
    subsets = 1 << MOST_READERS
    sums, least, cover, best = (np.zeros((subsets, placements)) for _ in range(4))
    turns, out = np.zeros(subsets, dtype=np.intp), np.zeros(placements)
    return Work(sums, turns, least, cover, best, out)

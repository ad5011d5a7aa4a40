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
from pipedream.optimizer.intra.solver.building import blocks, build
from pipedream.optimizer.intra.solver.factors import Factors, Slots, Variables, Work
from pipedream.optimizer.intra.solver.joining import Joined
from pipedream.optimizer.intra.solver.narrowing import Narrowed
from pipedream.optimizer.intra.solver.problem import TIE, Floats, Ints, Problem

_ROUNDING = 1e-8
"""Of a bound, in units: what falls by less has not fallen."""

_Index: TypeAlias = slice | Ints


@dataclass(frozen=True, eq=False)
class Part:
    """Variables between which messages are passed, in their order, and the factors that these are
    members of. `labels`, `messages`: where theirs are in arrays over all.
    """

    variables: Ints
    factors: Ints
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
        built = build(problem, price)
        messages = np.zeros(len(built.slots.usable))
        passing.begin(built.variables, built.slots, built.unary, messages)
        return Messages(problem, *built[:4], messages, *built[4:6], price, built.first_factor)

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
        """The bound after a sweep, when the least of each factor is nothing: it has told all it
        knows, and what it was sent then is nothing for one label.
        """
        own, _ = passing.bounds(part.variables, np.zeros(0, dtype=np.intp), *self._state)
        return float(own.sum())

    def taken(self, labels: Ints, part: Part) -> float:
        """What these labels take, in the part that the bound is of; a little less where a value has
        several factors.
        """
        own, joint = passing.costs(labels, part.variables, part.factors, *self._state)
        return float(own.sum() + joint.sum()) * self.unit

    @cached_property
    def whole(self) -> Part:
        variables, factors = len(self.variables.first) - 1, len(self.factors.heads) - 1
        return Part(np.arange(variables), np.arange(factors), slice(None), slice(None))

    def part(self, variables: Ints) -> Part:
        """Of these variables."""
        chosen = np.sort(variables)
        labels, slots = self.variables.first, self.variables.first_slot
        members = self.variables.slots[_ranges(slots[chosen], slots[chosen + 1])]
        heads, first = self.slots.heads, self.factors.heads["first"]
        factors, message = np.unique(heads["factor"][members]), heads["message"]
        messages = _ranges(message[first[factors]], message[first[factors + 1]])
        return Part(chosen, factors, _ranges(labels[chosen], labels[chosen + 1]), messages)

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
            for own, readers in zip(given, blocks(len(ends)), strict=True):
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


def _ranges(begin: Ints, end: Ints) -> Ints:
    """All numbers from each begin to before its end, one range after the other."""
    counts = end - begin
    return np.repeat(begin - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())

"""A lower bound by message passing, and good labels on the way.

Sequential reweighted message passing (Kolmogorov, "A New Look at Reweighted Message Passing", 2015;
for costs of pairs it is TRW-S, 2006) on the factor graph of a `Problem`: each value is a factor
over its source and its readers. A message is one number for each placement. Messages move costs
between variables and factors and change no sum, so at any time

    bound = sum over variables of min unary + sum over factors of min factor

is a lower bound. A factor is a small problem of facility location: with its source in a placement,
its readers fall into groups, each of which opens a placement. Its minima, for each placement of one
member, come from tables over the subsets of readers; values with many readers are several factors,
each with its part of the seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from pipedream.optimizer.intra.problem import Floats, Ints, Problem, Value

MOST_READERS = 5
"""Of one factor: the work doubles to triples with each."""

FORBIDDEN = 1e12
"""More than anything takes; costs are in units of which all together are a million at most."""
_ALL = 1e6
NOTHING = 1e18
"""What a minimum over nothing is."""


class Variables(NamedTuple):
    """`first[v]`: of its labels in arrays over all; `slots[first_slot[v]:first_slot[v + 1]]`."""

    first: Ints
    first_slot: Ints
    slots: Ints


class Slots(NamedTuple):
    """A slot is a member of a factor. `places[place + label]`: the placement of a label;
    `message`: where its messages begin; `turn`: 1 in the forward and 2 in the backward pass.
    """

    factor: Ints
    place: Ints
    message: Ints
    turn: Ints
    places: Ints
    usable: Ints
    ahead: Ints
    behind: Ints


class Factors(NamedTuple):
    """Factor f has the slots `first[f]` (its source) to before `first[f + 1]`.

    `costs[table + ((case * turns + turn - 1) * given + g) * wanted + p]`: of a group of readers,
    which are in the turns `turn`; `turns` is 1 where that makes no difference. `bases[base + case *
    given + g]`: besides. Of several cases the least counts.
    """

    first: Ints
    given: Ints
    wanted: Ints
    table: Ints
    base: Ints
    cases: Ints
    turns: Ints
    costs: Floats
    bases: Floats


class Work(NamedTuple):
    """Arrays over subsets of readers, for use within a function."""

    sums: Floats
    turns: Ints
    least: Floats
    cover: Floats
    out: Floats


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

    @staticmethod
    def of(problem: Problem, price: float = 0.0) -> Messages:
        return _Builder(problem, price).build()

    def sweep(self, count: int) -> None:
        """Passes messages forward and backward so many times."""
        for _ in range(count):
            for forward in (True, False):
                _sweep(
                    forward, self.variables, self.slots, self.factors,
                    self.unary, self.messages, self.work,
                )  # fmt: skip

    def bound(self) -> float:
        """Seconds that no labels take less than, counting bytes by their price."""
        return _bound(
            self.variables, self.slots, self.factors, self.unary, self.messages, self.work
        ) * self.unit  # fmt: skip

    def labels(self) -> Ints:
        """One label for each variable: in their order by what is known, then improved one by one
        until none is better.
        """
        return _labels(
            self.variables, self.slots, self.factors, self.unary, self.messages, self.work
        )

    def least(self) -> Floats:
        """For each label a lower bound on all choices with it, in seconds; labels of one variable
        after the other.
        """
        return _least(
            self.variables, self.slots, self.factors, self.unary, self.messages, self.work
        ) * self.unit  # fmt: skip

    def continue_from(self, before: Messages) -> None:
        """Begins with the messages of the same problem at another price."""
        usable = self.slots.usable == 1
        self.messages[usable] = before.messages[usable] * (before.unit / self.unit)
        _apply(self.variables, self.slots, self.unary, self.messages)


class _Builder:
    def __init__(self, problem: Problem, price: float) -> None:
        self.problem, self.price = problem, price
        self.unit = max(_most(problem, price), 1e-30) / _ALL
        self.tables: dict[tuple[object, ...], tuple[int, int]] = {}
        self.costs: list[Floats] = []
        self.bases: list[Floats] = []
        self.offsets = [0, 0]

    def build(self) -> Messages:
        problem = self.problem
        counts = np.array([len(each) for each in problem.seconds], dtype=np.intp)
        members, turns, heads, places, spans = [], [], [], [], []
        first = [0]
        for value in problem.values:
            for readers in _blocks(len(value.readers)):
                share = len(readers) / max(1, len(value.readers))
                table, base, cases, kinds = self._table(value, share)
                own = [value.source, *(value.readers[k] for k in readers)]
                members += own
                turns += [0, *(1 + value.backward[k] for k in readers)]
                places += [value.given, *(value.wanted[k] for k in readers)]
                given, wanted = value.seconds.shape
                spans += [given, *[wanted] * len(readers)]
                heads.append((given, wanted, table, base, cases, kinds))
                first.append(len(members))
        variable = np.array(members, dtype=np.intp)
        firsts = np.array(first, dtype=np.intp)
        message = np.concatenate([[0], np.cumsum(spans)]).astype(np.intp)
        flat = np.concatenate(places) if places else np.zeros(0, dtype=np.intp)
        place = np.concatenate([[0], np.cumsum([len(each) for each in places])]).astype(np.intp)
        factor = np.repeat(np.arange(len(first) - 1), np.diff(firsts))
        latest = np.maximum.reduceat(variable, firsts[:-1]) if len(heads) else variable
        earliest = np.minimum.reduceat(variable, firsts[:-1]) if len(heads) else variable
        columns = np.array(heads, dtype=np.intp).reshape(-1, 6).T
        order = np.argsort(variable, kind="stable")
        slot_counts = np.bincount(variable, minlength=len(counts))
        messages = Messages(
            problem,
            Variables(_offsets(counts), _offsets(slot_counts), order),
            Slots(
                factor,
                place[:-1],
                message[:-1],
                np.array(turns, dtype=np.intp),
                flat.astype(np.intp),
                np.zeros(message[-1], dtype=np.intp),
                (latest[factor] > variable).astype(np.intp),
                (earliest[factor] < variable).astype(np.intp),
            ),
            Factors(
                firsts, *columns, np.concatenate([*self.costs, [0.0]]),
                np.concatenate([*self.bases, [0.0]]),
            ),  # fmt: skip
            self._unary(),
            np.zeros(message[-1]),
            _work(max(spans, default=1)),
            self.unit,
            self.price,
        )
        _begin(messages.variables, messages.slots, messages.unary, messages.messages)
        return messages

    def _unary(self) -> Floats:
        seconds = np.concatenate([np.zeros(0), *self.problem.seconds])
        priced = seconds + self.price * np.concatenate([np.zeros(0), *self.problem.bytes])
        return np.minimum(priced / self.unit, FORBIDDEN)

    def _table(self, value: Value, share: float) -> tuple[int, int, int, int]:
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
            self.tables[key] = self.offsets[0], self.offsets[1], *costs.shape[:2]  # type: ignore[assignment]
            self.offsets = [self.offsets[0] + costs.size, self.offsets[1] + bases.size]
            self.costs.append(np.minimum(costs / self.unit, FORBIDDEN).ravel())
            self.bases.append(bases.ravel() / self.unit)
        return self.tables[key]  # type: ignore[return-value]


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


def _offsets(counts: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.intp)


def _work(placements: int) -> Work:
    subsets = 1 << MOST_READERS
    return Work(
        np.zeros((subsets, placements)),
        np.zeros(subsets, dtype=np.intp),
        np.zeros(subsets),
        np.zeros(subsets),
        np.zeros(placements),
    )


@njit(cache=True)
def _begin(variables, slots, unary, messages):  # type: ignore[no-untyped-def]
    """Marks the placements that a label has; others are forbidden to the member of the factor."""
    for v in range(len(variables.first) - 1):
        for k in range(variables.first_slot[v], variables.first_slot[v + 1]):
            slot = variables.slots[k]
            place, message = slots.place[slot], slots.message[slot]
            for x in range(variables.first[v + 1] - variables.first[v]):
                if unary[variables.first[v] + x] < FORBIDDEN:
                    slots.usable[message + slots.places[place + x]] = 1
    for m in range(len(messages)):
        if slots.usable[m] == 0:
            messages[m] = -FORBIDDEN


@njit(cache=True)
def _apply(variables, slots, unary, messages):  # type: ignore[no-untyped-def]
    """Adds to unary costs what the messages have moved there."""
    for v in range(len(variables.first) - 1):
        for k in range(variables.first_slot[v], variables.first_slot[v + 1]):
            slot = variables.slots[k]
            place, message = slots.place[slot], slots.message[slot]
            for x in range(variables.first[v + 1] - variables.first[v]):
                unary[variables.first[v] + x] += messages[message + slots.places[place + x]]


@njit(cache=True, fastmath=True)
def _minima(slot, slots, factors, messages, fixed, work):  # type: ignore[no-untyped-def]
    """Fills `work.out` with the least of the slot's factor, for each placement of the slot; other
    members with `fixed` >= 0 are in that placement.
    """
    # With G the groups into which readers T fall, their source in g:
    #   least[T] = min over p of costs[turns of T, g, p] + sum over T of -message[p]
    #   cover[T] = min over G within T, with the first of T, of least[G] + cover[T - G]
    #   out[p]   = min over g, T: base[g] - message[g] + cover[others - T] + that of T and p
    f = slots.factor[slot]
    first, given, wanted = factors.first[f], factors.given[f], factors.wanted[f]
    sums, turns, least, cover, out = work
    own = slot - first
    full = _gather(slot, slots, factors, messages, fixed, work)
    size = given if own == 0 else wanted
    for p in range(size):
        out[p] = NOTHING
    source = slots.message[first]
    many = factors.turns[f] > 1
    for case in range(factors.cases[f]):
        table = factors.table[f] + case * factors.turns[f] * given * wanted
        for g in range(given):
            base = factors.bases[factors.base[f] + case * given + g]
            if own > 0:
                if fixed[first] >= 0 and fixed[first] != g:
                    continue
                base -= messages[source + g]
                if base > 0.5 * FORBIDDEN:
                    continue
            for t in range(1, full + 1):
                row = table + ((turns[t] - 1) * given if many else 0) * wanted + g * wanted
                costs, terms, best = factors.costs[row : row + wanted], sums[t], NOTHING
                for p in range(wanted):
                    best = min(best, costs[p] + terms[p])
                least[t] = best
            for t in range(1, full + 1):
                low = t & -t
                rest = t ^ low
                best, part = least[t], rest
                while part:
                    part = (part - 1) & rest
                    best = min(best, least[part | low] + cover[rest ^ part])
                cover[t] = best
            if own == 0:
                out[g] = min(out[g], base + cover[full])
                continue
            for t in range(full + 1):
                turn = turns[t] | slots.turn[slot]
                row = table + ((turn - 1) * given if many else 0) * wanted + g * wanted
                others = base + cover[full ^ t]
                costs, terms = factors.costs[row : row + wanted], sums[t]
                for p in range(wanted):
                    out[p] = min(out[p], costs[p] + (terms[p] + others))
    message = slots.message[slot]
    for p in range(size):
        out[p] -= messages[message + p]


@njit(cache=True, fastmath=True)
def _gather(slot, slots, factors, messages, fixed, work):  # type: ignore[no-untyped-def]
    """Fills the sums and turns of all subsets of the readers other than the slot; returns the last
    of them.
    """
    f = slots.factor[slot]
    first, wanted = factors.first[f], factors.wanted[f]
    sums, turns, cover = work.sums, work.turns, work.cover
    for p in range(wanted):
        sums[0, p] = 0.0
    turns[0], cover[0], count = 0, 0.0, 0
    for member in range(first + 1, factors.first[f + 1]):
        if member == slot:
            continue
        bit, message = 1 << count, slots.message[member]
        for p in range(wanted):
            sums[bit, p] = -messages[message + p]
        if fixed[member] >= 0:
            for p in range(wanted):
                if fixed[member] != p:
                    sums[bit, p] = FORBIDDEN
        turns[bit] = slots.turn[member]
        for t in range(1, bit):
            turns[bit + t] = turns[t] | turns[bit]
            for p in range(wanted):
                sums[bit + t, p] = sums[t, p] + sums[bit, p]
        count += 1
    return (1 << count) - 1


@njit(cache=True)
def _sweep(forward, variables, slots, factors, unary, messages, work):  # type: ignore[no-untyped-def]
    """Each variable receives all that its factors know, and sends it on to those with members that
    come after it (or before it, backward), in equal parts.
    """
    free = np.full(len(slots.factor), -1)
    count = len(variables.first) - 1
    for step in range(count):
        v = step if forward else count - 1 - step
        begin, labels = variables.first[v], variables.first[v + 1] - variables.first[v]
        ahead, behind = 0, 0
        for k in range(variables.first_slot[v], variables.first_slot[v + 1]):
            slot = variables.slots[k]
            ahead += slots.ahead[slot]
            behind += slots.behind[slot]
            _minima(slot, slots, factors, messages, free, work)
            place, message = slots.place[slot], slots.message[slot]
            for x in range(labels):
                unary[begin + x] += work.out[slots.places[place + x]]
            f = slots.factor[slot]
            size = factors.given[f] if slot == factors.first[f] else factors.wanted[f]
            for p in range(size):
                if slots.usable[message + p]:
                    messages[message + p] += work.out[p]
        lowest = NOTHING
        for x in range(labels):
            lowest = min(lowest, unary[begin + x])
        share = 1.0 / max(1, ahead, behind)
        before = unary[begin : begin + labels].copy()
        for k in range(variables.first_slot[v], variables.first_slot[v + 1]):
            slot = variables.slots[k]
            if not (slots.ahead[slot] if forward else slots.behind[slot]):
                continue
            place, message = slots.place[slot], slots.message[slot]
            f = slots.factor[slot]
            size = factors.given[f] if slot == factors.first[f] else factors.wanted[f]
            for p in range(size):
                work.out[p] = NOTHING
            for x in range(labels):
                p = slots.places[place + x]
                work.out[p] = min(work.out[p], before[x] - lowest)
            for p in range(size):
                if slots.usable[message + p]:
                    messages[message + p] -= share * work.out[p]
            for x in range(labels):
                unary[begin + x] -= share * work.out[slots.places[place + x]]


@njit(cache=True)
def _bound(variables, slots, factors, unary, messages, work):  # type: ignore[no-untyped-def]
    free, total = np.full(len(slots.factor), -1), 0.0
    for v in range(len(variables.first) - 1):
        total += unary[variables.first[v] : variables.first[v + 1]].min()
    for f in range(len(factors.first) - 1):
        _minima(factors.first[f], slots, factors, messages, free, work)
        total += work.out[: factors.given[f]].min()
    return total


@njit(cache=True)
def _least(variables, slots, factors, unary, messages, work):  # type: ignore[no-untyped-def]
    free = np.full(len(slots.factor), -1)
    total = _bound(variables, slots, factors, unary, messages, work)
    least = np.zeros(len(unary))
    for v in range(len(variables.first) - 1):
        begin, end = variables.first[v], variables.first[v + 1]
        least[begin:end] = unary[begin:end]
        known = unary[begin:end].min()
        for k in range(variables.first_slot[v], variables.first_slot[v + 1]):
            slot = variables.slots[k]
            _minima(slot, slots, factors, messages, free, work)
            f = slots.factor[slot]
            size = factors.given[f] if slot == factors.first[f] else factors.wanted[f]
            known += work.out[:size].min()
            for x in range(end - begin):
                least[begin + x] += work.out[slots.places[slots.place[slot] + x]]
        for x in range(begin, end):
            least[x] += total - known
    return least


@njit(cache=True)
def _labels(variables, slots, factors, unary, messages, work):  # type: ignore[no-untyped-def]
    count = len(variables.first) - 1
    fixed = np.full(len(slots.factor), -1)
    chosen = np.zeros(count, dtype=np.intp)
    for improving in range(20):
        changes = 0
        for v in range(count):
            begin, labels = variables.first[v], variables.first[v + 1] - variables.first[v]
            costs = unary[begin : begin + labels].copy()
            for k in range(variables.first_slot[v], variables.first_slot[v + 1]):
                slot = variables.slots[k]
                _minima(slot, slots, factors, messages, fixed, work)
                for x in range(labels):
                    costs[x] += work.out[slots.places[slots.place[slot] + x]]
            best = chosen[v] if improving else 0
            for x in range(labels):
                if costs[x] < costs[best] - 1e-9 * abs(costs[best]):
                    best = x
            if improving and best != chosen[v]:
                changes += 1
            chosen[v] = best
            for k in range(variables.first_slot[v], variables.first_slot[v + 1]):
                slot = variables.slots[k]
                fixed[slot] = slots.places[slots.place[slot] + best]
        if improving and not changes:
            break
    return chosen

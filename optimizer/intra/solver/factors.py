"""The factors of a `Problem` as arrays, and their minima: small problems of facility location.

With its source in a placement, the readers of a value fall into groups, each of which opens a
placement. The least for each placement of one member comes from tables over the subsets of readers;
values with many readers are several factors, each with its part of the seconds.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import njit

from pipedream.optimizer.intra.solver.problem import Floats, Ints

MOST_READERS = 5
"""Of one factor: the work doubles to triples with each."""

FORBIDDEN = 1e12
"""More than anything takes; costs are in units of which all together are a million at most."""

NOTHING = 1e18
"""What a minimum over nothing is."""


class Variables(NamedTuple):
    """`first[v]`: of its labels in arrays over all; `slots[first_slot[v]:first_slot[v + 1]]`."""

    first: Ints
    first_slot: Ints
    slots: Ints


class Slots(NamedTuple):
    """A slot is a member of a factor. `places[place + label]`: the placement of a label;
    `message`: where its messages begin, and at the end where those of the last one end; `turn`: 1
    in the forward and 2 in the backward pass; `ahead`, `behind`: for how many values it stands if
    the factor has members after or before its variable, else 0.
    """

    factor: Ints
    place: Ints
    message: Ints
    turn: Ints
    places: Ints
    usable: Ints
    ahead: Floats
    behind: Floats


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


@njit(cache=True, fastmath=True)
def minima(slot, slots, factors, messages, fixed, work):  # type: ignore[no-untyped-def]
    """Fills `work.out` with the least of the slot's factor, for each placement of the slot, and
    returns how many these are; other members with `fixed` >= 0 are in that placement.
    """
    # With g the placement of the source, T the readers but the slot's:
    #   as the source   out[g] = min over cases of base[g] + cover[T]
    #   as a reader     out[p] = min over cases, g, t within T of
    #                            base[g] - message[g] + cover[T - t] + that of t with the slot in p
    f = slots.factor[slot]
    first, given, wanted = factors.first[f], factors.given[f], factors.wanted[f]
    out, is_source, turns = work.out, slot == first, factors.turns[f]
    full = _gather(slot, slots, factors, messages, fixed, work)
    size = given if is_source else wanted
    for p in range(size):
        out[p] = NOTHING
    for row in range(factors.cases[f] * given):
        case, g = row // given, row % given
        base = factors.bases[factors.base[f] + row]
        table = factors.table[f] + (case * turns * given + g) * wanted
        if is_source:
            _cover(full, table, given * wanted if turns > 1 else 0, wanted, factors.costs, work)
            out[g] = min(out[g], base + work.cover[full])
            continue
        base -= messages[slots.message[first] + g]
        if (fixed[first] >= 0 and fixed[first] != g) or base > 0.5 * FORBIDDEN:
            continue
        _cover(full, table, given * wanted if turns > 1 else 0, wanted, factors.costs, work)
        for t in range(full + 1):
            turn = (work.turns[t] | slots.turn[slot]) - 1 if turns > 1 else 0
            begin = table + turn * given * wanted
            costs, terms = factors.costs[begin : begin + wanted], work.sums[t]
            others = base + work.cover[full ^ t]
            for p in range(wanted):
                out[p] = min(out[p], costs[p] + (terms[p] + others))
    for p in range(size):
        out[p] -= messages[slots.message[slot] + p]
    return size


@njit(cache=True, fastmath=True)
def _cover(full, table, turn_size, wanted, costs, work):  # type: ignore[no-untyped-def]
    """Fills `work.cover` with the least of each subset of readers, in whatever groups."""
    # least[T] = min over p of costs[turns of T, p] + sums[T, p], T as one group
    # cover[T] = min over G within T, with the first of T, of least[G] + cover[T - G]
    for t in range(1, full + 1):
        begin = table + (work.turns[t] - 1) * turn_size
        row, terms, best = costs[begin : begin + wanted], work.sums[t], NOTHING
        for p in range(wanted):
            best = min(best, row[p] + terms[p])
        work.least[t] = best
    for t in range(1, full + 1):
        low = t & -t
        rest = t ^ low
        best, part = work.least[t], rest
        while part:
            part = (part - 1) & rest
            best = min(best, work.least[part | low] + work.cover[rest ^ part])
        work.cover[t] = best


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

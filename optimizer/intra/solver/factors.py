"""The factors of a `Problem` as arrays, and their minima: small problems of facility location.

With its source in a placement, the readers of a value fall into groups, each of which opens a
placement. The least for each placement of one member comes from tables over the subsets of readers;
values with many readers are several factors, each with its part of the seconds.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

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


SLOT = np.dtype(
    [
        *((name, np.intp) for name in ("factor", "place", "message", "turn")),
        *((name, np.float64) for name in ("ahead", "behind")),
    ]
)
"""A slot is a member of a factor. `places[place + label]`: the placement of a label; `message`:
where its messages begin; `turn`: 1 in the forward and 2 in the backward pass; `ahead`, `behind`:
for how many values it stands if the factor has members after or before its variable, else 0.
"""

FACTOR = np.dtype(
    [(name, np.intp) for name in ("first", "given", "wanted", "table", "base", "cases", "turns")]
)
"""A factor has the slots `first` (its source) to before that of the next factor.

`costs[table + ((case * turns + turn - 1) * given + g) * wanted + p]`: of a group of readers, which
are in the turns `turn`; `turns` is 1 where that makes no difference. `across`: the same with `p *
given + g`. `bases[base + case * given + g]`: besides. Of several cases the least counts.
"""

Records: TypeAlias = NDArray[np.void]
"""Slots or factors, and one more for where what these have ends: one array where there were one
for each field, since whatever compiled code takes out of a tuple it counts the references to.
"""


class Slots(NamedTuple):
    heads: Records
    places: Ints
    usable: Ints


class Factors(NamedTuple):
    heads: Records
    costs: Floats
    across: Floats
    bases: Floats


class Work(NamedTuple):
    """Arrays for use within a function: over subsets of readers and placements of these (`sums`,
    `best`) or of the source (`least`, `cover`); `turns` over subsets, `out` over placements. What
    `sums`, `turns` and `cover` are of no readers stays 0.
    """

    sums: Floats
    turns: Ints
    least: Floats
    cover: Floats
    best: Floats
    out: Floats


@njit(cache=True, fastmath=True)
def minima(slot, slots, factors, messages, fixed, work):  # type: ignore[no-untyped-def]
    """Fills `work.out` with the least of the slot's factor, for each placement of the slot, and
    returns how many these are; other members with `fixed` >= 0 are in that placement.
    """
    # With g the placement of the source, T the readers but the slot's:
    #   as the source   out[g] = min over cases of base[g] + cover[T, g]
    #   as a reader     out[p] = min over cases, see `_reader`
    head, out, full = slots.heads[slot], work.out, 0
    factor, end = factors.heads[head.factor], factors.heads[head.factor + 1].first
    size = factor.given if slot == factor.first else factor.wanted
    for member in range(factor.first + 1, end):
        if member != slot:
            own, place = slots.heads[member], fixed[member]
            full = _gather(full, own, factor.wanted, messages, place, work.sums, work.turns)
    for p in range(size):
        out[p] = NOTHING
    for case in range(factor.cases):
        base = factors.bases[factor.base + case * factor.given :]
        _cover(full, factor, case, factors.across, work)
        if slot == factor.first:
            for g in range(size):
                out[g] = min(out[g], base[g] + work.cover[full, g])
        else:
            source = messages[slots.heads[factor.first].message :]
            place = fixed[factor.first]
            _reader(head.turn, full, factor, case, factors.costs, base, source, place, work)
    for p in range(size):
        out[p] -= messages[head.message + p]
    return size


@njit(cache=True, fastmath=True)
def _reader(turn, full, factor, case, costs, base, source, place, work):  # type: ignore[no-untyped-def]
    """Lowers `out` to what a factor takes with a reader in this turn in each placement. `source`:
    the source's messages, `place`: its placement if that is given.
    """
    # out[p] = min over t within T of sums[t, p] +
    #          min over g of base[g] - source[g] + cover[T - t, g] + costs[turns of t, g, p]
    given, wanted, terms, best, out = factor.given, factor.wanted, work.least, work.best, work.out
    sums, cover = work.sums, work.cover
    for t in range(full + 1):
        for g in range(given):
            terms[t, g] = base[g] - source[g] + cover[full ^ t, g]
        if place >= 0:
            _keep(place, given, terms, t)
        table = _table(turn | work.turns[t], factor, case)
        _product(terms, t, given, costs, table, wanted, best)
        for p in range(wanted):
            out[p] = min(out[p], sums[t, p] + best[t, p])


@njit(cache=True, fastmath=True)
def _gather(full, member, wanted, messages, fixed, sums, turns):  # type: ignore[no-untyped-def]
    """Fills the sums and turns of all subsets with one more reader, those without being known, of
    which `full` is the last; returns the last one now.
    """
    bit = full + 1
    turns[bit] = member.turn
    for p in range(wanted):
        sums[bit, p] = -messages[member.message + p]
    if fixed >= 0:
        _keep(fixed, wanted, sums, bit)
    for t in range(1, bit):
        turns[bit + t] = turns[t] | turns[bit]
        for p in range(wanted):
            sums[bit + t, p] = sums[t, p] + sums[bit, p]
    return bit + full


@njit(cache=True, fastmath=True)
def _cover(full, factor, case, across, work):  # type: ignore[no-untyped-def]
    """Fills `work.cover` with the least of each subset of readers, in whatever groups, for each
    placement of the source.
    """
    # least[T, g] = min over p of costs[turns of T, g, p] + sums[T, p], T as one group
    # cover[T, g] = min over G within T, with the first of T, of least[G, g] + cover[T - G, g]
    given, wanted, least, cover = factor.given, factor.wanted, work.least, work.cover
    for t in range(1, full + 1):
        table = _table(work.turns[t], factor, case)
        _product(work.sums, t, wanted, across, table, given, least)
        for g in range(given):
            cover[t, g] = least[t, g]
        low = t & -t
        rest = t ^ low
        part = rest
        while part:
            part = (part - 1) & rest
            group, left = part | low, rest ^ part
            for g in range(given):
                cover[t, g] = min(cover[t, g], least[group, g] + cover[left, g])


@njit(cache=True, fastmath=True)
def _table(turn, factor, case):  # type: ignore[no-untyped-def]
    """Where that of a group in these turns begins."""
    own = turn - 1 if factor.turns > 1 else 0
    return factor.table + (case * factor.turns + own) * factor.given * factor.wanted


@njit(cache=True, fastmath=True)
def _product(terms, t, rows, tables, begin, columns, out):  # type: ignore[no-untyped-def]
    """out[t, c] = min over r of terms[t, r] + table[r, c]"""
    for c in range(columns):
        out[t, c] = FORBIDDEN
    row = np.uint64(begin)  # of numbers that may be negative each would be looked at
    for r in range(rows):
        term = terms[t, r]
        if term < 0.5 * FORBIDDEN:
            for c in range(columns):
                out[t, c] = min(out[t, c], term + tables[row + np.uint64(c)])
        row += np.uint64(columns)


@njit(cache=True, fastmath=True)
def _keep(place, count, terms, t):  # type: ignore[no-untyped-def]
    """Forbids all placements but this one."""
    for p in range(count):
        if p != place:
            terms[t, p] = FORBIDDEN

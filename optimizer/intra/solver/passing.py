"""Messages among the variables and factors of a `Problem`: sweeps, bounds and labels, as loops."""

from __future__ import annotations

import numpy as np
from numba import njit

from pipedream.optimizer.intra.solver.factors import FORBIDDEN, NOTHING, minima


@njit(cache=True)
def begin(variables, slots, unary, messages):  # type: ignore[no-untyped-def]
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
def apply(variables, slots, unary, messages):  # type: ignore[no-untyped-def]
    """Adds to unary costs what the messages have moved there."""
    for v in range(len(variables.first) - 1):
        for k in range(variables.first_slot[v], variables.first_slot[v + 1]):
            slot = variables.slots[k]
            place, message = slots.place[slot], slots.message[slot]
            for x in range(variables.first[v + 1] - variables.first[v]):
                unary[variables.first[v] + x] += messages[message + slots.places[place + x]]


@njit(cache=True)
def sweep(forward, variables, slots, factors, unary, messages, work):  # type: ignore[no-untyped-def]
    """Each variable receives all that its factors know, and sends it on to those with members that
    come after it (or before it, backward), in equal parts for each value that they stand for.
    """
    free = np.full(len(slots.factor), -1)
    count = len(variables.first) - 1
    for step in range(count):
        v = step if forward else count - 1 - step
        own = unary[variables.first[v] : variables.first[v + 1]]
        begin, end = variables.first_slot[v], variables.first_slot[v + 1]
        ahead, behind = 0.0, 0.0
        for slot in variables.slots[begin:end]:
            ahead += slots.ahead[slot]
            behind += slots.behind[slot]
            size = minima(slot, slots, factors, messages, free, work)
            _move(slot, size, 1.0, own, slots, messages, work.out)
        before, share = own - own.min(), 1.0 / max(1.0, ahead, behind)
        for slot in variables.slots[begin:end]:
            weight = slots.ahead[slot] if forward else slots.behind[slot]
            if weight > 0.0:
                size = _project(slot, before, slots, factors, work.out)
                _move(slot, size, -share * weight, own, slots, messages, work.out)


@njit(cache=True)
def _project(slot, unary, slots, factors, out):  # type: ignore[no-untyped-def]
    """Fills `out` with the least unary cost of each placement; returns how many these are."""
    f = slots.factor[slot]
    size = factors.given[f] if slot == factors.first[f] else factors.wanted[f]
    out[:size] = NOTHING
    places = slots.places[slots.place[slot] : slots.place[slot] + len(unary)]
    for x in range(len(unary)):
        out[places[x]] = min(out[places[x]], unary[x])
    return size


@njit(cache=True)
def _move(slot, size, share, unary, slots, messages, amounts):  # type: ignore[no-untyped-def]
    """Moves a share of these amounts, one for each placement, from the factor to the variable."""
    message = slots.message[slot]
    for p in range(size):
        if slots.usable[message + p]:
            messages[message + p] += share * amounts[p]
    places = slots.places[slots.place[slot] : slots.place[slot] + len(unary)]
    for x in range(len(unary)):
        unary[x] += share * amounts[places[x]]


@njit(cache=True)
def bound(variables, slots, factors, unary, messages, work):  # type: ignore[no-untyped-def]
    free, total = np.full(len(slots.factor), -1), 0.0
    for v in range(len(variables.first) - 1):
        total += unary[variables.first[v] : variables.first[v + 1]].min()
    for f in range(len(factors.first) - 1):
        minima(factors.first[f], slots, factors, messages, free, work)
        total += work.out[: factors.given[f]].min()
    return total


@njit(cache=True)
def least(variables, slots, factors, unary, messages, work):  # type: ignore[no-untyped-def]
    free = np.full(len(slots.factor), -1)
    total = bound(variables, slots, factors, unary, messages, work)
    least = np.zeros(len(unary))
    for v in range(len(variables.first) - 1):
        begin, end = variables.first[v], variables.first[v + 1]
        least[begin:end] = unary[begin:end]
        known = unary[begin:end].min()
        for k in range(variables.first_slot[v], variables.first_slot[v + 1]):
            slot = variables.slots[k]
            size = minima(slot, slots, factors, messages, free, work)
            known += work.out[:size].min()
            for x in range(end - begin):
                least[begin + x] += work.out[slots.places[slots.place[slot] + x]]
        for x in range(begin, end):
            least[x] += total - known
    return least


@njit(cache=True)
def label(variables, slots, factors, unary, messages, work):  # type: ignore[no-untyped-def]
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
                minima(slot, slots, factors, messages, fixed, work)
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

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
            place, message = slots.heads[slot].place, slots.heads[slot].message
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
            place, message = slots.heads[slot].place, slots.heads[slot].message
            for x in range(variables.first[v + 1] - variables.first[v]):
                unary[variables.first[v] + x] += messages[message + slots.places[place + x]]


@njit(cache=True)
def sweep(forward, part, variables, slots, factors, unary, messages, work):  # type: ignore[no-untyped-def]
    """Each variable of the part receives all that its factors know, and sends it on to those with
    members that come after it (or before it, backward), in equal parts for each value that they
    stand for.
    """
    free = np.full(len(slots.heads) - 1, -1)
    for v in part if forward else part[::-1]:
        own = unary[variables.first[v] : variables.first[v + 1]]
        begin, end = variables.first_slot[v], variables.first_slot[v + 1]
        ahead, behind = 0.0, 0.0
        for slot in variables.slots[begin:end]:
            ahead += slots.heads[slot].ahead
            behind += slots.heads[slot].behind
            if forward or slots.heads[slot].ahead > 0.0:  # else none was asked since
                size = minima(slot, slots, factors, messages, free, work)
                _move(slot, size, 1.0, own, slots, messages, work.out)
        before, share = own - own.min(), 1.0 / max(1.0, ahead, behind)
        for slot in variables.slots[begin:end]:
            weight = slots.heads[slot].ahead if forward else slots.heads[slot].behind
            if weight > 0.0:
                size = _project(slot, before, slots, factors, work.out)
                _move(slot, size, -share * weight, own, slots, messages, work.out)


@njit(cache=True)
def _project(slot, unary, slots, factors, out):  # type: ignore[no-untyped-def]
    """Fills `out` with the least unary cost of each placement; returns how many these are."""
    factor = factors.heads[slots.heads[slot].factor]
    size = factor.given if slot == factor.first else factor.wanted
    out[:size] = NOTHING
    places = slots.places[slots.heads[slot].place : slots.heads[slot].place + len(unary)]
    for x in range(len(unary)):
        out[places[x]] = min(out[places[x]], unary[x])
    return size


@njit(cache=True)
def _move(slot, size, share, unary, slots, messages, amounts):  # type: ignore[no-untyped-def]
    """Moves a share of these amounts, one for each placement, from the factor to the variable.

    Labels that are ruled out stay so: beside 1e12 a sum would lose what decides between others.
    """
    message = slots.heads[slot].message
    for p in range(size):
        if slots.usable[message + p]:
            messages[message + p] += share * amounts[p]
    places = slots.places[slots.heads[slot].place : slots.heads[slot].place + len(unary)]
    for x in range(len(unary)):
        moved = share * amounts[places[x]]
        unary[x] += moved if unary[x] < FORBIDDEN else 0.0


@njit(cache=True)
def _fixed(labels, variables, slots):  # type: ignore[no-untyped-def]
    """The placement of each slot with these labels; -1 for those of a variable with label -1."""
    fixed = np.full(len(slots.heads) - 1, -1)
    for v in range(len(labels)):
        if labels[v] >= 0:
            for slot in variables.slots[variables.first_slot[v] : variables.first_slot[v + 1]]:
                fixed[slot] = slots.places[slots.heads[slot].place + labels[v]]
    return fixed


@njit(cache=True)
def costs(labels, part, near, variables, slots, factors, unary, messages, work):  # type: ignore[no-untyped-def]
    """With these labels, of each variable of the part and each factor near it."""
    fixed = _fixed(labels, variables, slots)
    own, joint = np.zeros(len(part)), np.zeros(len(near))
    for k, v in enumerate(part):
        own[k] = unary[variables.first[v] + labels[v]]
    for k, f in enumerate(near):
        source = factors.heads[f].first
        minima(source, slots, factors, messages, fixed, work)
        joint[k] = work.out[fixed[source]]
    return own, joint


@njit(cache=True)
def bounds(part, near, variables, slots, factors, unary, messages, work):  # type: ignore[no-untyped-def]
    """The least that labels take, of each variable of the part and each factor near it."""
    free = np.full(len(slots.heads) - 1, -1)
    own, joint = np.zeros(len(part)), np.zeros(len(near))
    for k, v in enumerate(part):
        own[k] = unary[variables.first[v] : variables.first[v + 1]].min()
    for k, f in enumerate(near):
        size = minima(factors.heads[f].first, slots, factors, messages, free, work)
        joint[k] = work.out[:size].min()
    return own, joint


@njit(cache=True)
def decide(v, label, variables, slots, unary, messages):  # type: ignore[no-untyped-def]
    """Forbids all other labels of a variable, and the placements that none but they have."""
    begin, end = variables.first[v], variables.first[v + 1]
    for x in range(begin, end):
        if x != begin + label:
            unary[x] = FORBIDDEN
    for k in range(variables.first_slot[v], variables.first_slot[v + 1]):
        slot = variables.slots[k]
        chosen = slots.places[slots.heads[slot].place + label]
        for x in range(end - begin):
            place = slots.places[slots.heads[slot].place + x]
            if place != chosen:
                slots.usable[slots.heads[slot].message + place] = 0
                messages[slots.heads[slot].message + place] = -FORBIDDEN


@njit(cache=True)
def least(total, variables, slots, factors, unary, messages, work):  # type: ignore[no-untyped-def]
    """For each label, where `total` is the bound of all."""
    free, least = np.full(len(slots.heads) - 1, -1), np.zeros(len(unary))
    for v in range(len(variables.first) - 1):
        begin, end = variables.first[v], variables.first[v + 1]
        least[begin:end] = unary[begin:end]
        known = unary[begin:end].min()
        for k in range(variables.first_slot[v], variables.first_slot[v + 1]):
            slot = variables.slots[k]
            size = minima(slot, slots, factors, messages, free, work)
            known += work.out[:size].min()
            for x in range(end - begin):
                least[begin + x] += work.out[slots.places[slots.heads[slot].place + x]]
        for x in range(begin, end):
            least[x] += total - known
    return least


@njit(cache=True)
def label(given, part, variables, slots, factors, unary, messages, work):  # type: ignore[no-untyped-def]
    """Labels of the part by what is known, in the order of its variables, then improved one by one
    until none is better; others as they are given.
    """
    chosen = given.copy()
    chosen[part] = -1
    fixed = _fixed(chosen, variables, slots)
    for improving in range(20):
        changes = 0
        for v in part:
            begin, labels = variables.first[v], variables.first[v + 1] - variables.first[v]
            costs = unary[begin : begin + labels].copy()
            for k in range(variables.first_slot[v], variables.first_slot[v + 1]):
                slot = variables.slots[k]
                minima(slot, slots, factors, messages, fixed, work)
                for x in range(labels):
                    costs[x] += work.out[slots.places[slots.heads[slot].place + x]]
            best = chosen[v] if improving else 0
            for x in range(labels):
                if costs[x] < costs[best] - 1e-9 * max(1.0, abs(costs[best])):
                    best = x
            if improving and best != chosen[v]:
                changes += 1
            chosen[v] = best
            for k in range(variables.first_slot[v], variables.first_slot[v + 1]):
                slot = variables.slots[k]
                fixed[slot] = slots.places[slots.heads[slot].place + best]
        if improving and not changes:
            break
    return chosen

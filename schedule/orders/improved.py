"""Makes an order better, pass by pass: tabu search over the passes that a round waits for.

Moves as in the job shop: two passes of a place, one right after the other on a longest path, change
places (van Laarhoven, Aarts, Lenstra, "Job Shop Scheduling by Simulated Annealing", Operations
Research 40, 1992, where it is proved that such a move never makes a cycle, and that some sequence
of them leads to an optimum). The best one that is not tabu is taken, even if it makes the order
worse for now (Taillard, "Parallel Taboo Search Techniques for the Job Shop Scheduling Problem",
1994).
"""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.schedule.orders.timing import DeadlockError, Numbers, Times, Timing

_PATIENCE = 60
"""Turns without a better order after which there is none to be expected."""

_TABU = 8
"""Turns for which two passes that have changed places do not change back."""


def improved(timing: Timing, order: Numbers, effort: int) -> tuple[float, Numbers, int]:
    """Returns the seconds of a round, no more than those of `order`, the best order found, and the
    effort spent.

    `effort`: how many passes may be timed, of all orders tried together.
    """
    seconds, begin, end = timing.seconds_of_round(order)
    best, left = (seconds, order), effort
    tabu: dict[tuple[int, int], int] = {}
    turn, stale = 0, 0
    size = max(1, 3 * len(timing.passes))
    while left > 0 and stale < _PATIENCE:
        turn, stale = turn + 1, stale + 1
        tried = []
        for place, at in sorted(set(_swaps(timing, order, begin, end))):
            if left <= 0:
                break
            swapped = _swapped(order, place, at)
            left -= size
            if not timing.fits(swapped[place]):
                continue
            try:
                outcome = timing.seconds_of_round(swapped)
            except DeadlockError:
                continue
            pair = order[place][at], order[place][at + 1]
            if tabu.get(pair, 0) < turn or outcome[0] < best[0]:
                tried.append((outcome[0], pair, outcome, swapped))
        if not tried:
            break
        seconds, pair, (_, begin, end), order = min(tried, key=lambda each: each[:2])
        tabu[pair[::-1]] = turn + _TABU
        if seconds < best[0] * (1 - 1e-9):
            best, stale = (seconds, order), 0
    return *best, effort - left


def _swapped(order: Numbers, place: int, at: int) -> Numbers:
    own = list(order[place])
    own[at], own[at + 1] = own[at + 1], own[at]
    return [own if number == place else each for number, each in enumerate(order)]


def _swaps(timing: Timing, order: Numbers, begin: Times, end: Times) -> Iterator[tuple[int, int]]:
    """Yields (place, position) of passes on a longest path whose next one, right after them on
    their place, is on it too and does not need them.
    """
    position = {number: at for own in order for at, number in enumerate(own)}
    last = max((own for own in order if own), key=lambda own: end[own[-1]])[-1]
    left, seen = [last], {last}
    while left:
        number = left.pop()
        place, at = timing.place[number], position[number]
        start, sources = begin[number], []
        needed = {other for other, _ in timing.needs[number]}
        for other, delay in timing.needs[number]:
            if end[other] + delay >= start - 1e-12:
                sources.append(other)
        if at and end[before := order[place][at - 1]] >= start - 1e-12:
            sources.append(before)
            if before not in needed and not _same_queue(timing, before, number):
                yield place, at - 1
        for other in sources:
            if other not in seen:
                seen.add(other)
                left.append(other)


def _same_queue(timing: Timing, one: int, other: int) -> bool:
    """Whether both are the same pass of two microbatches: these stay in their order."""
    return timing.passes[one][:2] == timing.passes[other][:2]

"""Makes an order better, pass by pass: tabu search over the passes that a round waits for.

Moves as in the job shop, among passes of a place that follow one another on a longest path without
a gap: two neighbours change places (van Laarhoven, Aarts, Lenstra, "Job Shop Scheduling by
Simulated Annealing", Operations Research 40, 1992), or a pass goes to the beginning or the end of
them (Balas, Vazacopoulos, "Guided Local Search with Shifting Bottleneck for Job Shop Scheduling",
Management Science 44, 1998). The best one that is not tabu is taken, even if it makes the order
worse for now (Taillard, "Parallel Taboo Search Techniques for the Job Shop Scheduling Problem",
1994).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from pipedream.schedule.orders.timing import DeadlockError, Numbers, Times, Timing

_MOST_STALE_TURNS = 25
"""Turns without a better order after which there is none to be expected."""

_TABU_TENURE = 8
"""Turns for which two passes that have changed places do not change back."""

_EXCESS_PENALTY = 3.0
"""An order may lead through others that have no room: each is taken to last as much longer, in
parts of itself, as this times what its places hold too much, in parts of what they may hold.
"""

_RANDOM_MOVES = 8
"""Passes that go elsewhere at random."""


class _Move(NamedTuple):
    """The pass at position `at` of a place goes to position `to`."""

    place: int
    at: int
    to: int


def improved(timing: Timing, order: Numbers, effort: int) -> tuple[float, Numbers, int]:
    """Returns the seconds of a round, no more than those of `order`, the best order found, and the
    effort spent.

    `effort`: how many passes may be timed, of all orders tried together.
    """
    # order(t + 1) = the cheapest neighbour of order(t) that is not tabu, or that is better than the
    # best one so far; what a move has put the other way round is tabu for the next turns. It may
    # cost more than order(t): so the search leaves an order all of whose neighbours are worse.
    seconds, begin, end = timing.seconds_of_round(order)
    best, left = (seconds, order), effort
    tabu: dict[tuple[int, int], int] = {}
    turn, stale = 0, 0
    plays = 1 if timing.spec.joint_norm else 3
    while left > 0 and stale < _MOST_STALE_TURNS:
        turn, stale = turn + 1, stale + 1
        neighbours = []
        for move in sorted(set(_moves(timing, order, begin, end))):
            if left <= 0:
                break
            left -= plays * len(timing.passes)
            neighbour = _neighbour(timing, order, move)
            pairs = _reversed_pairs(order[move.place], move)
            allowed = all(tabu.get(pair, 0) < turn for pair in pairs)
            if neighbour is not None and (allowed or neighbour.is_better(best[0])):
                neighbours.append(neighbour)
        if not neighbours:
            break
        taken = min(neighbours, key=lambda neighbour: (neighbour.cost, neighbour.move))
        for one, other in _reversed_pairs(order[taken.move.place], taken.move):
            tabu[other, one] = turn + _TABU_TENURE
        order, begin, end = taken.order, taken.begin, taken.end
        if taken.is_better(best[0]):
            best, stale = (taken.seconds, order), 0
    return *best, effort - left


class _Neighbour(NamedTuple):
    """An order a move away; `excess`: what places hold too much, in parts of their limits."""

    move: _Move
    order: Numbers
    seconds: float
    begin: Times
    end: Times
    excess: float

    @property
    def cost(self) -> float:
        return self.seconds * (1 + _EXCESS_PENALTY * self.excess)

    def is_better(self, seconds: float) -> bool:
        return not self.excess and self.seconds < seconds * (1 - 1e-9)


def _neighbour(timing: Timing, order: Numbers, move: _Move) -> _Neighbour | None:
    """Returns the order after the move; None if the places would wait for one another."""
    moved = _moved(order, move)
    try:
        seconds, begin, end = timing.seconds_of_round(moved)
    except DeadlockError:
        return None
    return _Neighbour(move, moved, seconds, begin, end, sum(map(timing.excess, moved)))


def perturbed(timing: Timing, order: Numbers, chance: Random) -> Numbers:
    """Returns an order that some random moves lead to, in which all has room."""
    for _ in range(_RANDOM_MOVES):
        place = chance.randrange(len(order))
        sequence = order[place]
        at, to = chance.randrange(len(sequence)), chance.randrange(len(sequence))
        neighbour = _neighbour(timing, order, _Move(place, at, _furthest(timing, sequence, at, to)))
        if neighbour is not None and not neighbour.excess:
            order = neighbour.order
    return order


def _moved(order: Numbers, move: _Move) -> Numbers:
    sequence = list(order[move.place])
    sequence.insert(move.to, sequence.pop(move.at))
    return [sequence if number == move.place else passes for number, passes in enumerate(order)]


def _reversed_pairs(sequence: Sequence[int], move: _Move) -> list[tuple[int, int]]:
    """Returns the pairs of passes, the earlier one first, that a move puts the other way round."""
    number = sequence[move.at]
    if move.at < move.to:
        return [(number, other) for other in sequence[move.at + 1 : move.to + 1]]
    return [(other, number) for other in sequence[move.to : move.at]]


def _moves(timing: Timing, order: Numbers, begin: Times, end: Times) -> Iterator[_Move]:
    """Yields the moves within each run of passes that a longest path goes through without a gap."""
    for place, first, last in _blocks(timing, order, begin, end):
        sequence = order[place]
        for at in range(first, last):
            if not _stays(timing, sequence[at], sequence[at + 1]):
                yield _Move(place, at, at + 1)
        for at in range(first, last + 1):
            for to in (
                _furthest(timing, sequence, at, first),
                _furthest(timing, sequence, at, last),
            ):
                if abs(to - at) > 1:
                    yield _Move(place, at, to)


def _furthest(timing: Timing, sequence: Sequence[int], at: int, to: int) -> int:
    """Returns the position next to `to` to which the pass at `at` can go."""
    step = 1 if to > at else -1
    for position in range(at + step, to + step, step):
        one, other = (at, position) if step > 0 else (position, at)
        if _stays(timing, sequence[one], sequence[other]):
            return position - step
    return to


def _stays(timing: Timing, one: int, other: int) -> bool:
    """Tells whether `one` stays before `other`, which needs it or is of a later microbatch."""
    if timing.passes[one][:2] == timing.passes[other][:2]:
        return True
    return any(needed == one for needed, _ in timing.needs[other])


def _blocks(
    timing: Timing, order: Numbers, begin: Times, end: Times
) -> Iterator[tuple[int, int, int]]:
    """Yields (place, first, last position) of the longest runs without a gap on longest paths."""
    critical = _critical(timing, order, begin, end)
    for place, sequence in enumerate(order):
        first = 0
        for at in range(1, len(sequence) + 1):
            if at < len(sequence) and (sequence[at - 1], sequence[at]) in critical:
                continue
            if at - 1 > first:
                yield place, first, at - 1
            first = at


def _critical(timing: Timing, order: Numbers, begin: Times, end: Times) -> set[tuple[int, int]]:
    """Returns the pairs of passes of a place, one right after the other, on longest paths."""
    position = {number: at for sequence in order for at, number in enumerate(sequence)}
    last = max(
        (sequence for sequence in order if sequence), key=lambda sequence: end[sequence[-1]]
    )[-1]
    left, seen, pairs = [last], {last}, set()
    while left:
        number = left.pop()
        place, at = timing.place[number], position[number]
        start = begin[number] - 1e-12
        sources = [other for other, delay in timing.needs[number] if end[other] + delay >= start]
        if at and end[before := order[place][at - 1]] >= start:
            sources.append(before)
            pairs.add((before, number))
        for other in sources:
            if other not in seen:
                seen.add(other)
                left.append(other)
    return pairs

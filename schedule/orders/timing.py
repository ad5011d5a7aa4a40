"""When the passes of a round begin and end, in numbers: thousands of orders can be timed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import inf
from typing import TypeAlias

from pipedream.schedule.action import Kind
from pipedream.schedule.orders.passes import Pass, Round, needs, seconds_of
from pipedream.schedule.spec import PipelineSpec

Numbers: TypeAlias = list[list[int]]
"""The passes of each place, by their number."""

Times: TypeAlias = list[float]

_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class DeadlockError(Exception):
    """The places would wait for one another."""


class Timing:
    """Times any order of these passes. Others wait for a whole backward pass to its end, of one in
    halves for the first of them.
    """

    def __init__(self, spec: PipelineSpec, passes: Iterable[Pass]) -> None:
        self.spec, self.passes = spec, list(passes)
        times = spec.pass_times
        self.number = {each: number for number, each in enumerate(self.passes)}
        self.seconds = [seconds_of(times, each) for each in self.passes]
        self.needs = [
            [(self._known(needed), delay) for needed, delay in needs(spec, each)]
            for each in self.passes
        ]
        self.place = [spec.place_of[each.stage] for each in self.passes]
        self.holds = [self._holds(each) for each in self.passes]
        self.limit = times.limit or (inf,) * len(spec.places)
        self.slack = 1e-9 * sum(times.held)

    @staticmethod
    def of_halves(spec: PipelineSpec, microbatches: int) -> Timing:
        """Makes the timing of a round in which all backward passes are in halves."""
        stages = range(len(spec.replicas))
        numbers = range(microbatches)
        return Timing(spec, (Pass(s, k, b) for s in stages for k in _KINDS for b in numbers))

    def _known(self, needed: Pass) -> int:
        """Returns the number of a pass, or of the whole one that it is the first half of."""
        return self.number[needed if needed in self.number else needed._replace(kind=Kind.BACKWARD)]

    def _holds(self, pass_: Pass) -> float:
        """Returns by how many bytes it changes what its place holds."""
        held, kept = self.spec.pass_times.held[pass_.stage], self.spec.pass_times.kept[pass_.stage]
        changes = {
            Kind.FORWARD: held,
            Kind.BACKWARD: -held,
            Kind.BACKWARD_INPUT: kept - held,
            Kind.BACKWARD_WEIGHT: -kept,
        }
        return changes[pass_.kind]

    @cached_property
    def needed_by(self) -> list[list[tuple[int, float]]]:
        """Lists for each pass those that wait for it, and how long after it."""
        after: list[list[tuple[int, float]]] = [[] for _ in self.passes]
        for number, needed in enumerate(self.needs):
            for other, delay in needed:
                after[other].append((number, delay))
        return after

    def numbers(self, order: Round) -> Numbers:
        return [[self.number[pass_] for pass_ in passes] for passes in order]

    def round(self, order: Numbers) -> Round:
        return [[self.passes[number] for number in sequence] for sequence in order]

    def fits(self, sequence: Sequence[int]) -> bool:
        """Tells whether a place holds no more than it may, with its passes in this order."""
        return self.excess(sequence) == 0

    def excess(self, sequence: Sequence[int]) -> float:
        """Returns what a place would hold too much, in parts of its limit; 0 if nothing."""
        if not sequence or self.limit[self.place[sequence[0]]] == inf:
            return 0.0
        held_bytes, most, limit = 0.0, 0.0, self.limit[self.place[sequence[0]]]
        for number in sequence:
            held_bytes += self.holds[number]
            most = max(most, held_bytes)
        return (most - limit) / limit if most > limit + self.slack else 0.0

    def play(self, order: Numbers, begins: Sequence[float]) -> tuple[Times, Times]:
        """Returns when each pass begins, at the earliest, and ends. Raises DeadlockError."""
        # begin(p) = max(end(b), max of end(q) + delay(q, p) over all q that p needs), where b comes
        # before p on its place; end(p) = begin(p) + seconds(p). A place goes on until its next pass
        # needs one that has no end yet, and again when that has: so each need is looked at a few
        # times only, and what is left when no place can go on is a deadlock.
        begin, end = [inf] * len(self.passes), [inf] * len(self.passes)
        position, now = [0] * len(order), list(begins)
        waiting: dict[int, list[int]] = {}
        ready = deque(range(len(order)))
        left = sum(map(len, order))
        while ready:
            place = ready.popleft()
            sequence, at = order[place], position[place]
            while at < len(sequence):
                number, start = sequence[at], now[place]
                for needed, delay in self.needs[number]:
                    arrives = end[needed] + delay
                    if arrives == inf:
                        waiting.setdefault(needed, []).append(place)
                        break
                    if arrives > start:
                        start = arrives
                else:
                    begin[number] = start
                    end[number] = now[place] = start + self.seconds[number]
                    at, left = at + 1, left - 1
                    ready.extend(waiting.pop(number, ()))
                    continue
                break
            position[place] = at
        if left:
            raise DeadlockError
        return begin, end

    def seconds_of_round(self, order: Numbers) -> tuple[float, Times, Times]:
        """Returns how long a round takes where many follow one another, and when its passes begin
        and end.

        Where all wait for one another after it (`joint_norm`), from its beginning to its end; else
        each place goes on with the next round at once: then of a later round.
        """
        begins = [0.0] * len(order)
        begin, end = self.play(order, begins)
        if self.spec.joint_norm:
            return max(end[sequence[-1]] for sequence in order if sequence), begin, end
        for _ in range(2):
            before = [end[sequence[-1]] if sequence else 0.0 for sequence in order]
            begin, end = self.play(order, before)
        period = max(
            end[sequence[-1]] - at for sequence, at in zip(order, before, strict=True) if sequence
        )
        return period, begin, end


def halved(order: Round) -> Round:
    """Returns the order with whole backward passes in halves, one right after the other."""
    return [[half for pass_ in passes for half in _halves(pass_)] for passes in order]


def _halves(pass_: Pass) -> Iterator[Pass]:
    if pass_.kind is Kind.BACKWARD:
        yield pass_._replace(kind=Kind.BACKWARD_INPUT)
        yield pass_._replace(kind=Kind.BACKWARD_WEIGHT)
    else:
        yield pass_

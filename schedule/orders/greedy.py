"""A list scheduler for measured times: each place does at once the best of what it can do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from pipedream.schedule.action import Kind
from pipedream.schedule.orders.passes import Pass
from pipedream.schedule.orders.timing import Numbers, Timing


@dataclass(frozen=True)
class Rule:
    """Says how a place chooses among the passes that it can begin soonest.

    `patience`: it waits for the gradients of inputs, or a forward pass, that can begin within so
    many times the gradients of weights which it would compute meanwhile. `eager`: at most so many
    times what places hold in 1F1B. `deepest`: of forward passes that of the latest stage, else that
    of the earliest microbatch.
    """

    patience: float = 0.0
    eager: float = inf
    deepest: bool = True


@dataclass(eq=False)
class _Place:
    """Holds how far a place is. `forward`, `backward`: the next microbatch of each of its stages;
    `owed`: gradients of weights.
    """

    stages: tuple[int, ...]
    limit: float
    forward: dict[int, int]
    backward: dict[int, int]
    owed: list[int] = field(default_factory=list)
    now: float = 0.0
    held: float = 0.0


def greedy(timing: Timing, rule: Rule) -> Numbers | None:
    """Returns the order that comes out, or None if a place has no room for a single microbatch.

    A forward pass begins only where all microbatches before it, and itself, have room for the
    forward passes that they still have to do on that place: so the oldest one can always go on, and
    nothing can deadlock.
    """
    scheduler = _Greedy(timing, rule)
    return scheduler.order() if scheduler.has_room() else None


class _Greedy:
    def __init__(self, timing: Timing, rule: Rule) -> None:
        self.timing, self.rule = timing, rule
        self.microbatches = 1 + max(each.microbatch for each in timing.passes)
        spec = timing.spec
        self.held = spec.pass_times.held
        self.end = [inf] * len(timing.passes)
        self.places = []
        for place, stages in enumerate(spec.places):
            least = self._least(stages)
            # as many microbatches in flight as in 1F1B, times `eager`
            most = max(rule.eager * ((len(spec.places) - place) * least), least)
            begun = dict.fromkeys(stages, 0)
            self.places.append(_Place(stages, min(timing.limit[place], most), begun, dict(begun)))

    def _least(self, stages: tuple[int, ...]) -> float:
        """Returns the bytes of one microbatch in all of these stages."""
        return sum(self.held[stage] for stage in stages)

    def has_room(self) -> bool:
        slack = self.timing.slack
        return all(self._least(place.stages) <= place.limit + slack for place in self.places)

    def order(self) -> Numbers:
        order: Numbers = [[] for _ in self.places]
        # Of the passes that places would begin next the earliest one is next: nothing that begins
        # later can change it. A choice holds until its place has done a pass, or one that it needs
        # has ended.
        choices = [self._choice(place) for place in self.places]
        for _ in self.timing.passes:
            begin, number, at = min(
                (*choice, at) for at, choice in enumerate(choices) if choice is not None
            )
            order[at].append(number)
            self._do(self.places[at], number, begin)
            changed = {at, *(self.timing.place[n] for n, _ in self.timing.needed_by[number])}
            for place in changed:
                choices[place] = self._choice(self.places[place])
        return order

    def _do(self, place: _Place, number: int, begin: float) -> None:
        stage, kind, _ = self.timing.passes[number]
        self.end[number] = place.now = begin + self.timing.seconds[number]
        place.held += self.timing.holds[number]
        if kind is Kind.FORWARD:
            place.forward[stage] += 1
        elif kind is Kind.BACKWARD_INPUT:
            place.backward[stage] += 1
            place.owed.append(number + self.microbatches)
        else:
            place.owed.remove(number)

    def _choice(self, place: _Place) -> tuple[float, int] | None:
        """Returns when the place begins its next pass, and which; None if it cannot yet."""
        options = list(self._options(place))
        if place.owed:
            owed, soon = place.owed[0], place.now
            enough = soon + self.rule.patience * self.timing.seconds[owed]
            options = [option for option in options if option[0] <= enough]
            if not options:
                return soon, owed
        if not options:
            return None
        first = min(begin for begin, _, _ in options)
        begin, _, number = min(
            (begin, rank, number) for begin, rank, number in options if begin == first
        )
        return begin, number

    def _options(self, place: _Place) -> Iterator[tuple[float, tuple[int, int, int], int]]:
        """Yields when each pass could begin whose turn it is, its rank among others, its number."""
        for stage in place.stages:
            for coming, kind in (
                (place.backward[stage], Kind.BACKWARD_INPUT),
                (place.forward[stage], Kind.FORWARD),
            ):
                if coming == self.microbatches:
                    continue
                if kind is Kind.FORWARD and not self._has_room(place, stage, coming):
                    continue
                number = self.timing.number[Pass(stage, kind, coming)]
                ready = self._ready(number)
                if ready < inf:
                    yield max(ready, place.now), self._rank(stage, kind, coming), number

    def _rank(self, stage: int, kind: Kind, microbatch: int) -> tuple[int, int, int]:
        if kind is Kind.BACKWARD_INPUT:
            return 0, microbatch, stage
        return (1, -stage, microbatch) if self.rule.deepest else (1, microbatch, -stage)

    def _ready(self, number: int) -> float:
        needs = self.timing.needs[number]
        return max((self.end[needed] + delay for needed, delay in needs), default=0.0)

    def _has_room(self, place: _Place, stage: int, microbatch: int) -> bool:
        """Tells whether the place has room for all that is coming, up to this microbatch."""
        coming = sum(
            self.held[other] * max(0, microbatch + 1 - place.forward[other])
            for other in place.stages
        )
        return place.held + coming <= place.limit + self.timing.slack

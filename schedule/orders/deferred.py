"""Puts the gradients of weights, which nobody waits for, where a place would have to wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from pipedream.schedule.action import Kind
from pipedream.schedule.orders.passes import Pass, Round, needs, seconds_of
from pipedream.schedule.spec import PassTimes, PipelineSpec

_SAME = 1e-9
"""Moments that are less apart, in parts of themselves, are one."""


def deferred(
    spec: PipelineSpec, halves: Round, limit: Sequence[float], patience: float = 0.0
) -> Round | None:
    """Adds the gradients of the weights to `halves`: forward passes, and the gradients of the
    inputs, in an order that stays.

    A place computes the oldest that it owes when it would else wait for longer than `patience`
    times what that takes, or when its next forward pass would hold more than `limit` bytes. None if
    there is no room for what comes next.
    """
    places = [_Place(passes, most) for passes, most in zip(halves, limit, strict=True)]
    over: dict[Pass, float] = {}
    left = sum(map(len, halves))
    while left:
        begin, place = min(
            ((_begin(spec, each, over, patience), each) for each in places), key=lambda e: e[0]
        )
        if begin == inf:
            return None
        left -= place.go_on(begin, spec.pass_times, over)
    return [[*place.order, *place.owed] for place in places]


@dataclass(eq=False)
class _Place:
    """Holds how far a place is, what it holds and owes; `owing`: what it owes comes next."""

    passes: Sequence[Pass]
    limit: float
    position: int = 0
    now: float = 0.0
    held: float = 0.0
    owing: bool = False
    owed: deque[Pass] = field(default_factory=deque)
    order: list[Pass] = field(default_factory=list)

    def go_on(self, begin: float, times: PassTimes, over: dict[Pass, float]) -> bool:
        """Does what comes next; returns whether it is one of the passes that were given."""
        pass_ = self.owed.popleft() if self.owing else self.passes[self.position]
        self.order.append(pass_)
        self.now = begin + seconds_of(times, pass_)
        stage = pass_.stage
        if self.owing:
            self.held -= times.kept[stage]
            return False
        self.position += 1
        over[pass_] = self.now
        if pass_.kind is Kind.FORWARD:
            self.held += times.held[stage]
        else:
            self.held -= times.held[stage] - times.kept[stage]
            self.owed.append(pass_._replace(kind=Kind.BACKWARD_WEIGHT))
        return True


def _begin(spec: PipelineSpec, place: _Place, over: Mapping[Pass, float], patience: float) -> float:
    """Returns when the place goes on, and sets what with; infinite if it does not."""
    place.owing = bool(place.owed)
    if place.position == len(place.passes):
        return inf
    pass_, times = place.passes[place.position], spec.pass_times
    if pass_.kind is Kind.FORWARD and place.held + times.held[pass_.stage] > place.limit:
        return place.now if place.owing else inf
    ready = (over.get(needed, inf) + delay for needed, delay in needs(spec, pass_))
    begin = max(place.now, 0.0, *ready)
    if place.owing:
        enough = patience * seconds_of(times, place.owed[0])
        place.owing = begin - place.now > max(enough, _SAME * place.now)
    return place.now if place.owing else begin

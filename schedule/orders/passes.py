"""A round of forward and backward passes that ends with a flush: its order, peaks and messages.

The ranks of a pipeline are called places here, numbered from 0: where stages have replicas, each
place has several ranks, which do the same with other microbatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from pipedream.schedule.action import ENDS_BACKWARD, Kind
from pipedream.schedule.spec import PassTimes, PipelineSpec


class Pass(NamedTuple):
    """A pass of one stage, of microbatch `microbatch` of the round."""

    stage: int
    kind: Kind
    microbatch: int


Round: TypeAlias = Sequence[Sequence[Pass]]
"""The passes of each place, in their order."""


def needs(spec: PipelineSpec, pass_: Pass) -> Iterator[tuple[Pass, float]]:
    """Yields the passes that one waits for, and the seconds until what they send has arrived.

    A whole backward pass counts as its first half: what gives the gradients of the inputs.
    """
    stage, kind, b = pass_
    if kind is Kind.FORWARD:
        for source in spec.sources(stage):
            yield Pass(source, Kind.FORWARD, b), spec.delay((source, stage), is_gradient=False)
    elif kind is Kind.BACKWARD_WEIGHT:
        yield Pass(stage, Kind.BACKWARD_INPUT, b), 0.0
    else:
        yield Pass(stage, Kind.FORWARD, b), 0.0
        for target in spec.targets(stage):
            delay = spec.delay((stage, target), is_gradient=True)
            yield Pass(target, Kind.BACKWARD_INPUT, b), delay


def seconds_of(times: PassTimes, pass_: Pass) -> float:
    """Returns how long a pass takes."""
    stage = pass_.stage
    if pass_.kind is Kind.FORWARD:
        return times.forward[stage]
    if pass_.kind is Kind.BACKWARD_INPUT:
        return times.backward_input[stage]
    if pass_.kind is Kind.BACKWARD_WEIGHT:
        return times.backward_weight[stage]
    return times.backward_input[stage] + times.backward_weight[stage]


def whole_where_nothing_waits(spec: PipelineSpec, order: Round) -> Round:
    """Joins adjacent halves of a backward pass where a stage sends no gradients."""
    return [list(_joined(spec, passes)) for passes in order]


def _joined(spec: PipelineSpec, passes: Sequence[Pass]) -> Iterator[Pass]:
    coming = iter(passes)
    for pass_ in coming:
        if pass_.kind is not Kind.BACKWARD_INPUT or spec.sources(pass_.stage):
            yield pass_
            continue
        following = next(coming, None)
        if following == pass_._replace(kind=Kind.BACKWARD_WEIGHT):
            yield pass_._replace(kind=Kind.BACKWARD)
        else:
            yield pass_
            if following is not None:
                yield following


def peaks(order: Round, stages: int) -> tuple[int, ...]:
    """Returns the most microbatches of each stage between forward and end of backward pass."""
    most, in_flight = [0] * stages, [0] * stages
    for stage, kind, _ in (pass_ for passes in order for pass_ in passes):
        if kind is Kind.FORWARD:
            in_flight[stage] += 1
            most[stage] = max(most[stage], in_flight[stage])
        elif kind in ENDS_BACKWARD:
            in_flight[stage] -= 1
    return tuple(most)


class Arrival(NamedTuple):
    """A message that stage `target` receives from stage `source`."""

    source: int
    target: int
    is_gradient: bool
    microbatch: int


def received(spec: PipelineSpec, order: Round) -> list[list[tuple[Pass, list[Arrival]]]]:
    """Returns the passes of each place with what it receives before each.

    Messages from one place to another are received in the order in which they are sent, whichever
    stages they are for: before what a pass needs comes what was sent before that, which is there by
    then. So a network that knows no tags can carry them.
    """
    coming: dict[_Way, deque[Arrival]] = {}
    for passes in order:
        for pass_ in passes:
            for message in _messages(spec, pass_, outwards=True):
                coming.setdefault(_way(spec, message), deque()).append(message)
    there: set[Arrival] = set()
    return [
        [(pass_, list(_arrivals(spec, pass_, coming, there))) for pass_ in passes]
        for passes in order
    ]


_Way: TypeAlias = tuple[int, int, bool, int, int]


def _way(spec: PipelineSpec, message: Arrival) -> _Way:
    """Returns what has one order: all messages between two places, of a link within one."""
    source, target, is_gradient, _ = message
    places = spec.place_of[source], spec.place_of[target]
    link = (source, target) if places[0] == places[1] else (-1, -1)
    return (*places, is_gradient, *link)


def _messages(spec: PipelineSpec, pass_: Pass, outwards: bool) -> Iterator[Arrival]:
    """Yields what a pass sends, or else what it needs."""
    stage, kind, b = pass_
    if kind is Kind.BACKWARD_WEIGHT:
        return
    is_gradient = kind is not Kind.FORWARD
    peers = spec.targets(stage) if outwards is not is_gradient else spec.sources(stage)
    for peer in peers:
        source, target = (stage, peer) if outwards else (peer, stage)
        yield Arrival(source, target, is_gradient, b)


def _arrivals(
    spec: PipelineSpec,
    pass_: Pass,
    coming: Mapping[_Way, deque[Arrival]],
    there: set[Arrival],
) -> Iterator[Arrival]:
    for message in _messages(spec, pass_, outwards=False):
        queue = coming[_way(spec, message)]
        while message not in there:
            first = queue.popleft()
            there.add(first)
            yield first

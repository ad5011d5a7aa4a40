"""A round of forward and backward passes that ends with a flush: its order, its times, its peaks.

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


class DeadlockError(Exception):
    """The places would wait for one another."""


def needs(spec: PipelineSpec, each: Pass) -> Iterator[tuple[Pass, float]]:
    """Yields the passes that one waits for, and the seconds until what they send has arrived.

    A whole backward pass counts as its first half: what gives the gradients of the inputs.
    """
    stage, kind, b = each
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


def as_waited_for(each: Pass) -> Pass:
    """Returns the pass by the name that `needs` has for it."""
    if each.kind is Kind.BACKWARD:
        return each._replace(kind=Kind.BACKWARD_INPUT)
    return each


def seconds_of(times: PassTimes, each: Pass) -> float:
    """Returns how long a pass takes."""
    stage = each.stage
    if each.kind is Kind.FORWARD:
        return times.forward[stage]
    if each.kind is Kind.BACKWARD_INPUT:
        return times.backward_input[stage]
    if each.kind is Kind.BACKWARD_WEIGHT:
        return times.backward_weight[stage]
    return times.backward_input[stage] + times.backward_weight[stage]


def timed(spec: PipelineSpec, order: Round, rounds: int = 1) -> list[list[tuple[float, float]]]:
    """Returns when each pass of each place begins and ends, each as early as it can.

    Rounds follow one another on each place without waiting for the other places. Raises
    DeadlockError.
    """
    begins = [0.0] * len(order)
    for _ in range(rounds):
        times = _play(spec, order, begins)
        begins = [own[-1][1] if own else begin for own, begin in zip(times, begins, strict=True)]
    return times


def _play(
    spec: PipelineSpec, order: Round, begins: Sequence[float]
) -> list[list[tuple[float, float]]]:
    times = spec.pass_times
    over: dict[Pass, float] = {}
    played: list[list[tuple[float, float]]] = [[] for _ in order]
    waiting: dict[Pass, list[int]] = {}
    ready = deque(range(len(order)))
    while ready:
        place = ready.popleft()
        own, now = played[place], begins[place]
        if own:
            now = own[-1][1]
        for each in order[place][len(own) :]:
            begin = now
            for needed, delay in needs(spec, each):
                if needed not in over:
                    waiting.setdefault(needed, []).append(place)
                    break
                begin = max(begin, over[needed] + delay)
            else:
                now = begin + seconds_of(times, each)
                own.append((begin, now))
                name = as_waited_for(each)
                over[name] = now
                ready.extend(waiting.pop(name, ()))
                continue
            break
    if any(len(own) < len(passes) for own, passes in zip(played, order, strict=True)):
        raise DeadlockError
    return played


def period(spec: PipelineSpec, order: Round) -> float:
    """Returns the seconds of a round where many follow one another.

    If all wait for one another at the end of each (`joint_norm`), from its beginning to its end.
    """
    if not any(order):
        return 0.0
    if spec.joint_norm:
        return max(own[-1][1] for own in timed(spec, order) if own)
    before, after = (timed(spec, order, rounds) for rounds in (2, 3))
    return max(b[-1][1] - a[-1][1] for a, b in zip(before, after, strict=True) if a)


def whole_where_nothing_waits(spec: PipelineSpec, order: Round) -> Round:
    """Joins the halves of a backward pass, one right after the other, where a stage sends no
    gradients.
    """
    return [list(_joined(spec, own)) for own in order]


def _joined(spec: PipelineSpec, own: Sequence[Pass]) -> Iterator[Pass]:
    coming = iter(own)
    for each in coming:
        if each.kind is not Kind.BACKWARD_INPUT or spec.sources(each.stage):
            yield each
            continue
        following = next(coming, None)
        if following == each._replace(kind=Kind.BACKWARD_WEIGHT):
            yield each._replace(kind=Kind.BACKWARD)
        else:
            yield each
            if following is not None:
                yield following


def peaks(order: Round, stages: int) -> tuple[int, ...]:
    """Returns the most microbatches that each stage has in flight, between forward pass and the end
    of the backward pass.
    """
    most, held = [0] * stages, [0] * stages
    for stage, kind, _ in (each for own in order for each in own):
        if kind is Kind.FORWARD:
            held[stage] += 1
            most[stage] = max(most[stage], held[stage])
        elif kind in ENDS_BACKWARD:
            held[stage] -= 1
    return tuple(most)


def held_bytes(order: Round, times: PassTimes) -> tuple[float, ...]:
    """Returns the most bytes that each place holds at once, of all its stages."""
    return tuple(max(_held(own, times), default=0.0) for own in order)


def _held(own: Sequence[Pass], times: PassTimes) -> Iterator[float]:
    held = 0.0
    for stage, kind, _ in own:
        if kind is Kind.FORWARD:
            held += times.held[stage]
        elif kind is Kind.BACKWARD_INPUT:
            held -= times.held[stage] - times.kept[stage]
        else:
            held -= times.kept[stage] if kind is Kind.BACKWARD_WEIGHT else times.held[stage]
        yield held


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
    for own in order:
        for each in own:
            for message in _messages(spec, each, outwards=True):
                coming.setdefault(_way(spec, message), deque()).append(message)
    there: set[Arrival] = set()
    return [[(each, list(_arrivals(spec, each, coming, there))) for each in own] for own in order]


_Way: TypeAlias = tuple[int, int, bool, int, int]


def _way(spec: PipelineSpec, message: Arrival) -> _Way:
    """What has one order: all messages between two places, of a link within one."""
    source, target, is_gradient, _ = message
    places = spec.place_of[source], spec.place_of[target]
    link = (source, target) if places[0] == places[1] else (-1, -1)
    return (*places, is_gradient, *link)


def _messages(spec: PipelineSpec, each: Pass, outwards: bool) -> Iterator[Arrival]:
    """Yields what a pass sends, or else what it needs."""
    stage, kind, b = each
    if kind is Kind.BACKWARD_WEIGHT:
        return
    is_gradient = kind is not Kind.FORWARD
    peers = spec.targets(stage) if outwards is not is_gradient else spec.sources(stage)
    for peer in peers:
        source, target = (stage, peer) if outwards else (peer, stage)
        yield Arrival(source, target, is_gradient, b)


def _arrivals(
    spec: PipelineSpec,
    each: Pass,
    coming: Mapping[_Way, deque[Arrival]],
    there: set[Arrival],
) -> Iterator[Arrival]:
    for message in _messages(spec, each, outwards=False):
        queue = coming[_way(spec, message)]
        while message not in there:
            first = queue.popleft()
            there.add(first)
            yield first

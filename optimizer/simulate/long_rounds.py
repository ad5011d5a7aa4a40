"""Rounds of very many microbatches, from shorter ones that are played.

Between filling and draining a round of the flush schedule soon repeats itself: when every action of
some consecutive microbatches, as many as there can be under way, comes as much later than the same
action one period before, so will all that follow until the round drains, since nothing but those
times decides when they run. Each further period then adds the same time, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, lcm
from typing import TYPE_CHECKING

from pipedream.graph.timeline import Timeline
from pipedream.schedule.action import Kind
from pipedream.schedule.steady_state import SteadySpan, bubble

if TYPE_CHECKING:
    from pipedream.optimizer.simulate.simulator import Simulation

_TURNS = 12
"""A period is so many turns of the replicas: the fewest that shorter ones fit in, mostly."""

_SAME = 1e-9
"""Seconds in a second of simulated time that a difference of rounding may make."""

_OF_A_ROUND = (Kind.ALL_REDUCE, Kind.UPDATE)


def rounds_to_play(replicas: Sequence[int], microbatches: int) -> Iterator[int]:
    """Rounds to try in place of one of `microbatches`: longer and longer, at last this one.

    They differ from it by whole periods, and have room for one beside filling and draining.
    """
    period = _period(replicas)
    count = period * (1 + ceil(8 * sum(replicas) / period)) + microbatches % period
    while 2 * count < microbatches:
        yield count
        count += period * ceil(count / period)
    yield microbatches


def lengthened(
    played: Simulation, span: SteadySpan, replicas: Sequence[int], length: int, microbatches: int
) -> Simulation | None:
    """What `played`, of rounds of `length`, says of rounds of `microbatches`; None where a round
    does not come to repeat itself. Events and memory are those of the shorter rounds.
    """
    starts = range(span.first, span.last, length)
    times = _times(played.events)
    steps = [_step(times, start + length, replicas) for start in starts]
    found = [step for step in steps if step is not None]
    if len(found) < len(steps):
        return None
    before = played.seconds_per_minibatch * length
    after = before + sum(found) / len(found) * (microbatches - length) / _period(replicas)
    workers = sum(replicas)
    updates = _updates(played.events, span, length)
    passes = (1 - played.bubble) * workers * before - updates
    busy = passes / length * microbatches + updates
    return replace(
        played,
        seconds_per_minibatch=after / microbatches,
        bubble=bubble(busy, workers, after),
    )


def _period(replicas: Sequence[int]) -> int:
    return _TURNS * lcm(*replicas)


def _times(events: Timeline) -> dict[int, list[float]]:
    """For each minibatch when each of its actions was over: worker by worker, in their order."""
    times: dict[int, list[float]] = {}
    for done in events.values():
        for event in done:
            if event.action.kind not in _OF_A_ROUND:
                times.setdefault(event.action.minibatch, []).append(event.end)
    return times


def _step(times: Mapping[int, Sequence[float]], end: int, replicas: Sequence[int]) -> float | None:
    """By how much each action is later than that one period before, just before the drain of the
    round that ends with minibatch `end` - 1; None where these times differ.
    """
    period, workers = _period(replicas), sum(replicas)
    steps = [
        now - before
        for minibatch in range(end - 3 * workers, end - workers)
        for now, before in zip(times[minibatch], times[minibatch - period], strict=True)
    ]
    return steps[0] if max(steps) - min(steps) <= _SAME * max(times[end - 1]) else None


def _updates(events: Timeline, span: SteadySpan, length: int) -> float:
    """Seconds that the updates of one round take, those of all workers together."""
    return sum(
        event.end - event.begin
        for done in events.values()
        for event in done
        if event.action.kind is Kind.UPDATE
    ) / (span.minibatches / length)

"""Extrapolates rounds of very many microbatches from shorter ones that are simulated.

Between filling and draining, a round of the flush schedule soon becomes periodic. Once every action
of as many consecutive microbatches as can be in flight comes the same time after the same action
one period before, so do all later ones until the round drains, since only those times determine
when they run. Each further period then adds exactly that time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, lcm

from pipedream.graph.timeline import Timeline
from pipedream.optimizer.simulate.simulation import Simulation
from pipedream.schedule.action import CLOSING, Kind
from pipedream.schedule.steady_state import SteadySpan, bubble

_TURNS = 12
"""Turns of the replicas in a period; most shorter periods divide it."""

_SAME = 1e-9
"""Relative tolerance for rounding of simulated times."""


def rounds_to_play(replicas: Sequence[int], microbatches: int) -> Iterator[int]:
    """Lengths of rounds to simulate instead of one of `microbatches`, which comes last.

    They differ from it by whole periods, and hold one period besides filling and draining.
    """
    period = _period(replicas)
    count = period * (1 + ceil(8 * sum(replicas) / period)) + microbatches % period
    while 2 * count < microbatches:
        yield count
        count += period * ceil(count / period)
    yield microbatches


def lengthened(
    simulation: Simulation,
    span: SteadySpan,
    replicas: Sequence[int],
    length: int,
    microbatches: int,
) -> Simulation | None:
    """Extrapolates `simulation`, of rounds of `length`, to rounds of `microbatches`.

    None if the rounds do not become periodic. Events and memory stay those of the shorter rounds.
    """
    starts = range(span.first, span.last, length)
    times = _times(simulation.events)
    steps = [_step(times, start + length, replicas) for start in starts]
    periods = [step for step in steps if step is not None]
    if len(periods) < len(steps):
        return None
    before = simulation.seconds_per_minibatch * length
    after = before + sum(periods) / len(periods) * (microbatches - length) / _period(replicas)
    workers = sum(replicas)
    updates = _updates(simulation.events, span, length)
    passes = (1 - simulation.bubble) * workers * before - updates
    busy = passes / length * microbatches + updates
    return replace(
        simulation,
        seconds_per_minibatch=after / microbatches,
        bubble=bubble(busy, workers, after),
    )


def _period(replicas: Sequence[int]) -> int:
    return _TURNS * lcm(*replicas)


def _times(events: Timeline) -> dict[int, list[float]]:
    """Returns the ends of the actions of each minibatch, worker by worker, in order."""
    times: dict[int, list[float]] = {}
    for of_rank in events.values():
        for event in of_rank:
            if event.action.kind not in CLOSING:
                times.setdefault(event.action.minibatch, []).append(event.end)
    return times


def _step(times: Mapping[int, Sequence[float]], end: int, replicas: Sequence[int]) -> float | None:
    """The time between an action and the same action one period before, just before the drain of
    the round that ends with minibatch `end` - 1; None if it differs between actions.
    """
    period, workers = _period(replicas), sum(replicas)
    steps = [
        now - before
        for minibatch in range(end - 3 * workers, end - workers)
        for now, before in zip(times[minibatch], times[minibatch - period], strict=True)
    ]
    return steps[0] if max(steps) - min(steps) <= _SAME * max(times[end - 1]) else None


def _updates(events: Timeline, span: SteadySpan, length: int) -> float:
    """Returns the seconds that the updates of one round take on all workers together."""
    return sum(
        event.end - event.begin
        for of_rank in events.values()
        for event in of_rank
        if event.action.kind is Kind.UPDATE
    ) / (span.minibatches / length)

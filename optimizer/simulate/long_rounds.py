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
from typing import NamedTuple

from pipedream.graph.timeline import Timeline
from pipedream.optimizer.simulate.simulation import Simulation
from pipedream.schedule.action import CLOSING, Kind
from pipedream.schedule.steady_state import SteadySpan, bubble

_TURNS = (1, 12)
"""Turns of the replicas in a period that are tried: one, and then as many as most others divide."""
_FILLED = (5, 8)
"""Minibatches for each worker in the shortest round that is played, by period."""

_SAME = 1e-9
"""Relative tolerance for rounding of simulated times."""


class ShortRound(NamedTuple):
    """A round of `length` microbatches, in which every `period` of them may be like the last."""

    length: int
    period: int


def rounds_to_play(replicas: Sequence[int], microbatches: int) -> Iterator[ShortRound]:
    """Rounds to simulate instead of one of `microbatches`, which comes last.

    They differ from it by whole periods, and hold one period besides filling and draining.
    """
    workers, turn = sum(replicas), lcm(*replicas)
    for turns, filled in zip(_TURNS, _FILLED, strict=True):
        period = turns * turn
        count = period * (1 + ceil(filled * workers / period)) + microbatches % period
        while 2 * count < microbatches:
            yield ShortRound(count, period)
            if turns == 1:  # if it is none, a longer round does not make it one
                break
            count += period * ceil(count / period)
    yield ShortRound(microbatches, microbatches)


def lengthened(
    simulation: Simulation,
    span: SteadySpan,
    replicas: Sequence[int],
    played: ShortRound,
    microbatches: int,
) -> Simulation | None:
    """Extrapolates `simulation`, of rounds as `played`, to rounds of `microbatches`.

    None if the rounds do not become periodic. Events and memory stay those of the shorter rounds.
    """
    length, period = played
    starts = range(span.first, span.last, length)
    times = _times(simulation.events)
    steps = [_step(times, start + length, period, sum(replicas)) for start in starts]
    periods = [step for step in steps if step is not None]
    if len(periods) < len(steps):
        return None
    before = simulation.seconds_per_minibatch * length
    after = before + sum(periods) / len(periods) * (microbatches - length) / period
    workers = sum(replicas)
    updates = _updates(simulation.events, span, length)
    passes = (1 - simulation.bubble) * workers * before - updates
    busy = passes / length * microbatches + updates
    return replace(
        simulation,
        seconds_per_minibatch=after / microbatches,
        bubble=bubble(busy, workers, after),
    )


def _times(events: Timeline) -> dict[int, list[float]]:
    """Returns the ends of the actions of each minibatch, worker by worker, in order."""
    times: dict[int, list[float]] = {}
    for of_rank in events.values():
        for event in of_rank:
            if event.action.kind not in CLOSING:
                times.setdefault(event.action.minibatch, []).append(event.end)
    return times


def _step(
    times: Mapping[int, Sequence[float]], end: int, period: int, workers: int
) -> float | None:
    """The time between an action and the same action one period before, just before the drain of
    the round that ends with minibatch `end` - 1; None if it differs between actions.
    """
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

"""Extrapolates rounds of very many microbatches from shorter ones that are simulated.

Between filling and draining, a round of the flush schedule soon becomes periodic. Once every action
of as many consecutive microbatches as can be in flight comes the same time after the same action
one period before, so do all later ones until the round drains, since only those times determine
when they run. Each further period then adds exactly that time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, lcm
from typing import NamedTuple

import numpy as np

from pipedream.optimizer.cuts.planning_graph import Floats
from pipedream.optimizer.simulate.program import KINDS, Program
from pipedream.optimizer.simulate.simulation import Simulation
from pipedream.schedule.action import CLOSING, Kind
from pipedream.schedule.steady_state import SteadySpan, bubble

_TURNS = (1, 12)
"""Turns of the replicas in a period that are tried: one, and then as many as most others divide."""
_FILLED = (5, 8)
"""Minibatches for each worker in the shortest round that is played, by period."""

EXACTLY, ROUGHLY = 1e-9, 0.1
"""How much the steps of actions over a period may differ, as shares of them: as they do by rounding
of simulated times; or as while stages before the slowest still fill up and are faster than it. That
sets the pace: on plans of 32 workers and 512 microbatches it was right within 0.1 %.
"""

_CLOSES = np.array([kind in CLOSING for kind in KINDS])
_UPDATE = KINDS.index(Kind.UPDATE)


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
    alike: float = EXACTLY,
) -> Simulation | None:
    """Extrapolates `simulation`, of rounds as `played`, to rounds of `microbatches`.

    None if the rounds do not become periodic, as nearly as `alike` says. Events and memory stay
    those of the shorter rounds.
    """
    length, period = played
    ends = _ends(simulation.program, simulation.end)
    if ends is None:
        return None
    rounds = range(span.first + length, span.last + 1, length)
    periods = [step for end in rounds if (step := _step(ends, end, period, sum(replicas), alike))]
    if len(periods) < len(rounds):
        return None
    before = simulation.seconds_per_minibatch * length
    after = before + sum(periods) / len(periods) * (microbatches - length) / period
    workers = sum(replicas)
    updates = _updates(simulation, span, length)
    passes = (1 - simulation.bubble) * workers * before - updates
    busy = passes / length * microbatches + updates
    return replace(
        simulation,
        seconds_per_minibatch=after / microbatches,
        bubble=bubble(busy, workers, after),
    )


def lengthened_by(
    simulation: Simulation,
    longer: Simulation,
    played: ShortRound,
    microbatches: int,
    workers: int,
) -> Simulation:
    """Extrapolates rounds of gpipe, in which all forward passes repeat, and then all backward
    passes: each period adds as much as it does from `simulation`, of rounds as `played`, to
    `longer`, of rounds with one period more.
    """
    before = simulation.seconds_per_minibatch * played.length
    period = longer.seconds_per_minibatch * (played.length + played.period) - before
    after = before + period * (microbatches - played.length) / played.period
    busy = (1 - simulation.bubble) * workers * simulation.seconds_per_minibatch
    seconds = after / microbatches
    return replace(
        simulation,
        seconds_per_minibatch=seconds,
        bubble=bubble(min(busy, workers * seconds), workers, seconds),
    )


def _ends(program: Program, end: Floats) -> Floats | None:
    """[minibatch, action]: the ends of the actions of each minibatch, worker by worker, in order;
    None if not all minibatches have as many.
    """
    passes = np.flatnonzero(~_CLOSES[program.kind])
    minibatches = program.minibatch[passes]
    count = int(minibatches.max(initial=0)) + 1
    if (np.bincount(minibatches, minlength=count) * count != len(passes)).any():
        return None
    ordered: Floats = end[passes[np.argsort(minibatches, kind="stable")]].reshape(count, -1)
    return ordered


def _step(ends: Floats, end: int, period: int, workers: int, alike: float) -> float | None:
    """The mean time between an action of the slowest stage and the same action one period before,
    just before the drain of the round that ends with minibatch `end` - 1; None if it is not `alike`
    for all actions.
    """
    last = slice(end - 3 * workers, end - workers)
    steps = ends[last] - ends[last.start - period : last.stop - period]
    scale = float(ends[end - 1].max()) if alike == EXACTLY else float(steps.mean())
    differ = float(steps.max() - steps.min()) > alike * scale
    return None if differ else float(steps.mean(axis=0).max())


def _updates(simulation: Simulation, span: SteadySpan, length: int) -> float:
    """Returns the seconds that the updates of one round take on all workers together."""
    updates = simulation.program.kind == _UPDATE
    seconds = float((simulation.end - simulation.begin)[updates].sum())
    return seconds / (span.minibatches / length)

"""The steady state of a pipeline: which minibatches it has, how long they take, the bubble.

One definition for simulated schedules and measured runs: both are lists of timed actions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil, lcm
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipedream.graph.timeline import Timeline
from pipedream.schedule.action import BACKWARDS, ENDS_BACKWARD, Kind
from pipedream.schedule.policy import Policy

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

BUSY: Collection[str] = BACKWARDS | {Kind.FORWARD, Kind.UPDATE}
"""The kinds of action that are work; the rest of a rank's time is the bubble."""


@dataclass(frozen=True)
class SteadySpan:
    """Says which of `minibatches` find the pipeline full: those from `first` to before `last`.

    Schedules that empty the pipeline after every round fill it as often, which counts: for them
    the span has whole rounds, all but the first.
    """

    minibatches: int
    first: int
    last: int

    @staticmethod
    def for_simulation(policy: Policy, rounds_that_drain: int = 2) -> SteadySpan:
        """Returns the shortest run worth simulating.

        It fills the pipeline twice, runs twice as long, then drains. The span has whole turns of
        all replicas, so that each gets its share, unless a turn is much longer than the pipeline.
        """
        replicas, microbatches = policy.spec.replicas, policy.spec.microbatches
        workers = sum(replicas)
        turn = lcm(*replicas)
        turn = turn if turn <= 4 * workers else max(replicas)
        if policy.uniform_updates:
            rounds = lcm(microbatches, turn)
            # Rounds that drain take the same, whichever replica has the first of its minibatches.
            turn = microbatches if policy.drains and rounds > 4 * microbatches else rounds
        if policy.drains:
            last = turn * (1 + rounds_that_drain)
            return SteadySpan(last, turn, last)
        fill = turn * ceil(max(workers, policy.in_flight(0) * replicas[0]) / turn)
        return SteadySpan(5 * fill, 2 * fill, 4 * fill)

    @staticmethod
    def within(policy: Policy, minibatches: int, known: int = 0) -> SteadySpan | None:
        """Returns the steady part of an epoch that was run, or None if the epoch is too short.

        `known`: the first minibatch whose actions were recorded.
        """
        replicas = policy.spec.replicas
        if policy.drains and len(replicas) > 1:
            turn = lcm(policy.spec.microbatches, *replicas)
            first, last = (-(-known // turn) + 1) * turn, minibatches // turn * turn
        else:
            fill = policy.in_flight(0) * replicas[0]
            first, last = known + fill, minibatches - fill
        return SteadySpan(minibatches, first, last) if last > first else None

    def __len__(self) -> int:
        return self.last - self.first


def steady_window(timeline: Timeline, span: SteadySpan | None) -> tuple[float, float]:
    """Returns when the span begins and ends, in the seconds of the timeline.

    From when a stage has run the backward passes before minibatch `first` to when it has run those
    before `last`, for the stage that takes longest; without a span from the first action to the
    last. (From when all stages have run them, the window would be too short by as much as early
    stages lag behind at its beginning more than at its end.)
    """
    events = [event for events in timeline.values() for event in events]
    begin = min((event.begin for event in events), default=0.0)
    if span is None:
        return begin, max((event.end for event in events), default=0.0)
    passes = [event for event in events if event.action.kind in ENDS_BACKWARD]
    stage = np.array([event.action.stage for event in passes])
    minibatch = np.array([event.action.minibatch for event in passes])
    return longest_window(stage, minibatch, np.array([event.end for event in passes]), span, begin)


def longest_window(
    stage: Ints, minibatch: Ints, end: Floats, span: SteadySpan, begin: float = 0.0
) -> tuple[float, float]:
    """Returns `steady_window` of backward passes given by arrays; `begin`: the first action."""
    windows = []
    for number in range(stage.max(initial=-1) + 1):
        of_stage = stage == number
        first, last = (
            float(end[of_stage & (minibatch < count)].max(initial=begin))
            for count in (span.first, span.last)
        )
        windows.append((first, last))
    return max(windows, key=lambda window: window[1] - window[0], default=(begin, begin))


def bubble(busy: float, ranks: int, window: float) -> float:
    """Returns the share of `ranks` times `window` seconds that is not `busy`."""
    return max(0.0, 1 - busy / (ranks * window)) if window else 0.0

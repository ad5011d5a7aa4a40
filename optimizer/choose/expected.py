"""The time to be expected in a run: of several plays in which passes vary."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from pipedream.graph.plan import DraftPlan, StageSeconds
from pipedream.graph.variation import levels
from pipedream.optimizer.choose.interval import interval
from pipedream.optimizer.search.outcome import Outcome
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.simulator import ASSUMED, Noise

_PLAYS, _PLAYS_OF_DRIFT = 5, 12
"""Where all workers drift alike, and where each has its own. One of many devices says as much."""


class Expected(NamedTuple):
    """Seconds per minibatch of a run, between which nine of ten runs take, and what the workers of
    each stage do in that time.
    """

    seconds: float
    interval: tuple[float, float]
    stages: tuple[StageSeconds, ...]

    def noted_in(self, outcome: Outcome) -> Outcome:
        """The outcome with these figures in its plan."""
        return outcome.predicting(
            expected_seconds_per_minibatch=self.seconds,
            expected_interval=self.interval,
            expected_stages=self.stages,
        )


def expected(plan: DraftPlan, request: Request) -> Expected | None:
    """None if the plan takes long to simulate."""
    spread, own = request.spread or ASSUMED, request.own_drift
    alike = request.simulate(plan, noise=Noise([fmean(spread)], 0))
    count = 1 if request.has_many_devices else _PLAYS_OF_DRIFT if own else _PLAYS
    drift = _levels(own, count, len({rank for stage in plan.stages for rank in stage.ranks}))
    tried = (request.simulate(plan, noise=Noise(spread, *each)) for each in enumerate(drift))
    plays = [played for played in tried if played is not None]
    if alike is None or not plays:
        return None
    seconds = fmean(played.seconds_per_minibatch for played in plays)
    waiting = seconds - alike.seconds_per_minibatch
    within = interval(seconds, waiting, request.uncertainty)
    return Expected(seconds, within, _mean([played.stages for played in plays]))


def _levels(own: float, plays: int, ranks: int) -> list[tuple[float, ...]]:
    """Returns for each play how slow each rank is: over the plays of a rank all levels come in
    another order (latin hypercube sampling, McKay et al., 1979); over the ranks, of one play.
    """
    if not own:
        return [()] * plays
    chance = np.random.default_rng(0)
    if plays == 1:
        return [tuple(chance.permutation(levels(own, ranks)))]
    of_ranks = [chance.permutation(levels(own, plays)) for _ in range(ranks)]
    return list(zip(*of_ranks, strict=True))


def _mean(plays: Sequence[Sequence[StageSeconds]]) -> tuple[StageSeconds, ...]:
    return tuple(
        StageSeconds(
            compute=fmean(stage.compute for stage in stages),
            waiting=fmean(stage.waiting for stage in stages),
            exchange=fmean(stage.exchange for stage in stages),
        )
        for stages in zip(*plays, strict=True)
    )

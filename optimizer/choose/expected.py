"""The time to be expected in a run: of several plays in which passes vary."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from pipedream.graph.plan import DraftPlan, StageSeconds
from pipedream.optimizer.choose.interval import interval
from pipedream.optimizer.search.outcome import Outcome
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.simulator import ASSUMED, Noise

_PLAYS = 5


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
    spread = request.spread or ASSUMED
    alike = request.simulate(plan, noise=Noise([fmean(spread)], 0))
    tried = (request.simulate(plan, noise=Noise(spread, seed)) for seed in range(_PLAYS))
    plays = [played for played in tried if played is not None]
    if alike is None or not plays:
        return None
    seconds = fmean(played.seconds_per_minibatch for played in plays)
    waiting = seconds - alike.seconds_per_minibatch
    within = interval(seconds, waiting, request.uncertainty)
    return Expected(seconds, within, _mean([played.stages for played in plays]))


def _mean(plays: Sequence[Sequence[StageSeconds]]) -> tuple[StageSeconds, ...]:
    return tuple(
        StageSeconds(
            compute=fmean(stage.compute for stage in stages),
            waiting=fmean(stage.waiting for stage in stages),
            exchange=fmean(stage.exchange for stage in stages),
        )
        for stages in zip(*plays, strict=True)
    )

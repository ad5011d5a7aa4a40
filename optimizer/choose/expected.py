"""The time to be expected in a run: of several plays in which passes vary."""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

from pipedream.graph.plan import DraftPlan
from pipedream.optimizer.search.outcome import Outcome
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.simulator import ASSUMED, Noise

_PLAYS = 5


class Expected(NamedTuple):
    """Seconds per minibatch of a run, and by how much runs deviate from it either way."""

    seconds: float
    deviation: float

    def noted_in(self, outcome: Outcome) -> Outcome:
        """The outcome with these figures in its plan."""
        return outcome.predicting(
            expected_seconds_per_minibatch=self.seconds,
            expected_deviation_seconds=self.deviation,
        )


def expected(plan: DraftPlan, request: Request) -> Expected | None:
    """None if the plan takes long to simulate."""
    seconds = []
    for seed in range(_PLAYS):
        noise = Noise(request.spread or ASSUMED, seed)
        played = request.simulate(plan, noise=noise)
        if played is None:
            return None
        seconds.append(played.seconds_per_minibatch)
    return Expected(fmean(seconds), (max(seconds) - min(seconds)) / 2)

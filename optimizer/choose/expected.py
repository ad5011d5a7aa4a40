"""The time to be expected in a run: of several plays in which passes vary."""

from __future__ import annotations

from statistics import fmean

from pipedream.optimizer.search.outcome import Outcome
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.noise import ASSUMED, Noise
from pipedream.optimizer.simulate.simulator import QUICK_MOVES, simulate_plan

_PLAYS = 5


def with_expected(outcome: Outcome, request: Request) -> Outcome:
    """The outcome with what is expected in a run, if that can be simulated quickly."""
    spread = request.spread or ASSUMED
    played = [
        simulate_plan(
            outcome.plan,
            request.graph,
            request.update_rate,
            request.overheads,
            QUICK_MOVES,
            Noise(spread, seed),
        )
        for seed in range(_PLAYS)
    ]
    seconds = [each.seconds_per_minibatch for each in played if each is not None]
    if not seconds:
        return outcome
    return outcome.predicting(
        expected_seconds_per_minibatch=fmean(seconds),
        expected_deviation_seconds=(max(seconds) - min(seconds)) / 2,
    )

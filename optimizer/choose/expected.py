"""The time to be expected in a run: of several plays in which passes vary."""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

from pipedream.graph.plan import DraftPlan
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.simulator import ASSUMED, QUICK_MOVES, Noise, simulate_plan

_PLAYS = 5


class Expected(NamedTuple):
    """Seconds per minibatch of a run, and by how much runs deviate from it either way."""

    seconds: float
    deviation: float


def expected(plan: DraftPlan, request: Request) -> Expected | None:
    """None if the plan takes long to simulate."""
    seconds = []
    for seed in range(_PLAYS):
        noise = Noise(request.spread or ASSUMED, seed)
        played = simulate_plan(
            plan, request.graph, request.update_rate, request.overheads, QUICK_MOVES, noise
        )
        if played is None:
            return None
        seconds.append(played.seconds_per_minibatch)
    return Expected(fmean(seconds), (max(seconds) - min(seconds)) / 2)

"""The time to be expected in a run: of several plays in which passes vary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from pipedream.graph.plan import DraftPlan, StageSeconds
from pipedream.graph.variation import levels
from pipedream.optimizer.choose.interval import interval
from pipedream.optimizer.cuts.planning_graph import Floats
from pipedream.optimizer.search.outcome import Outcome
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.simulator import ASSUMED, Noise

_PLAYS, _PLAYS_OF_DRIFT = 5, 12
"""Where all workers drift alike, and where each has its own. One of many devices says as much."""
_ORDERS = 64
"""Of levels over plays that are tried."""


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
    count = _PLAYS_OF_DRIFT if request.own_drift else _PLAYS
    drift = _levels(plan, request, 1 if request.has_many_devices else count)
    tried = (request.simulate(plan, noise=Noise(spread, *each)) for each in enumerate(drift))
    plays = [played for played in tried if played is not None]
    if alike is None or not plays:
        return None
    seconds = fmean(played.seconds_per_minibatch for played in plays)
    waiting = seconds - alike.seconds_per_minibatch
    within = interval(seconds, waiting, request.uncertainty)
    return Expected(seconds, within, _mean([played.stages for played in plays]))


def _levels(
    plan: DraftPlan, request: Request, plays: int
) -> Iterator[dict[int, tuple[float, ...]]]:
    """Yields for each play, by rank, how slow each of its devices is: over the plays of a device
    all levels come in another order (latin hypercube sampling, McKay et al., 1979), of several ways
    the one in which no two devices go together; over the devices, of a single play.
    """
    teams = dict[int, int]()
    for stage, devices in zip(plan.stages, request.devices_of(len(plan.stages)), strict=True):
        teams |= dict.fromkeys(stage.ranks, devices)
    own, total, chance = request.own_drift, sum(teams.values()), np.random.default_rng(0)

    def drawn() -> Floats:
        if plays == 1:
            return chance.permutation(levels(own, total))[:, None]
        return np.array([chance.permutation(levels(own, plays)) for _ in range(total)])

    of_devices = min((drawn() for _ in range(_ORDERS if own else 1)), key=_alike)
    ends = np.cumsum([*teams.values()])[:-1]
    for play in of_devices.T:
        own_levels = map(tuple, np.split(play, ends))
        yield dict(zip(teams, own_levels, strict=True))


def _alike(of_devices: Floats) -> float:
    """How much the levels of any two devices go together."""
    apart = of_devices - of_devices.mean(axis=1, keepdims=True)
    together = apart @ apart.T
    return float(np.abs(together - np.diag(together.diagonal())).max())


def _mean(plays: Sequence[Sequence[StageSeconds]]) -> tuple[StageSeconds, ...]:
    return tuple(
        StageSeconds(
            compute=fmean(stage.compute for stage in stages),
            waiting=fmean(stage.waiting for stage in stages),
            exchange=fmean(stage.exchange for stage in stages),
        )
        for stages in zip(*plays, strict=True)
    )

"""The plan whose stages have the meshes on which it is fastest, by steps from those of one mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipedream.graph.plan import Plan
from pipedream.optimizer.choose.candidates import data_parallel
from pipedream.optimizer.choose.chooser import priced_outcome
from pipedream.optimizer.choose.division import Division
from pipedream.optimizer.choose.local_search import best_first, climb
from pipedream.optimizer.choose.neighbours import Neighbours
from pipedream.optimizer.choose.placed_trials import PlacedTrials
from pipedream.optimizer.choose.trial import Trial
from pipedream.optimizer.search.outcome import Outcome, placed_outcome
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.sharding.mesh_steps import MeshSteps
from pipedream.optimizer.sharding.views import Views

_BUDGET = 200_000
"""Actions simulated, about, from each of the best plans to begin with."""

_STARTS = 2
"""So many of the best plans of one mesh are improved."""

_BETTER, _WORTH_MEMORY, _WORTH_EXPLORING = 1e-4, 0.01, 1.25
"""As in the search with workers of one device (choose/chooser.py)."""


class MeshTrials(PlacedTrials):
    """Trials of divisions whose stages have meshes."""

    def __init__(self, views: Views) -> None:
        super().__init__(views.request)
        self.views = views

    def priced(self, division: Division) -> Request:
        return self.views.priced(division)

    def _passes(self, division: Division) -> float:
        """Seconds are only known once it is priced."""
        return 0.0


def start(plan: Plan, mesh: int, views: Views) -> Division:
    """The division of a plan all of whose stages have this mesh."""
    ranks = tuple(tuple(team.leader for team in stage.teams) for stage in plan.stages)
    found = Division.of(plan, views.request.planning)
    return found._replace(ranks=ranks, meshes=(mesh,) * len(ranks))


def best_division(trials: MeshTrials, starts: Sequence[Division]) -> Trial | None:
    """The fastest division found from these; None if none of them can be simulated and fits."""
    views, request = trials.views, trials.request
    tried = (trials.tried(division) for division in starts)
    fitting = [trial for trial in tried if trial is not None and trial.fits]
    if not fitting:
        return None
    fitting.sort(key=lambda trial: trial.seconds)
    around = MeshSteps(request.planning, request.cluster, [each.devices for each in views.views])

    def steps(division: Division) -> Iterator[tuple[Division, float]]:
        yield from ((other, _WORTH_MEMORY) for other in Neighbours.in_flight(division))
        yield from ((other, _BETTER) for other in around.of(division))

    climbed = [climb(each, trials, steps, trials.spent + _BUDGET) for each in fitting[:_STARTS]]
    most = trials.spent + _BUDGET
    explored = best_first([*climbed, *fitting], trials, around.of, most, _WORTH_EXPLORING)
    return climb(explored, trials, steps, trials.spent + _BUDGET)


def outcome_of(trial: Trial, views: Views, bound: float) -> tuple[Request, Outcome]:
    """The request with the figures of the division, and the outcome; `bound`: seconds per minibatch
    that no division takes less than.
    """
    request, alone = views.priced(trial.division), views.request
    whole = data_parallel(alone)
    memory = alone.memory_model(whole.cuts(alone.planning))
    replicated = placed_outcome(memory, alone, whole.placed(alone.cluster))
    said = replicated.plan.predicted
    outcome = priced_outcome(request, trial, bound).predicting(
        one_worker_seconds=said.one_worker_seconds,
        data_parallel_seconds=said.data_parallel_seconds,
    )
    return request, replace(outcome, whole_model_bytes=replicated.whole_model_bytes)

"""The plan whose stages have the meshes on which it is fastest, by steps from those of one mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipedream.graph.plan import Plan
from pipedream.graph.profile import Profile
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
from pipedream.optimizer.sharding.stage_divisions import StageDivisions
from pipedream.optimizer.sharding.views import Views

_BUDGET = 400_000
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

    def priced(self, division: Division) -> Request | None:
        own = self.views_of(division)
        return None if own is None else own.priced(division)

    def views_of(self, division: Division) -> Views | None:
        """How the division sees the model; None where finding that out would take too long."""
        return self.views

    def _passes(self, division: Division) -> float:
        """Seconds are only known once it is priced."""
        return 0.0


class DividedTrials(MeshTrials):
    """The same with the operators of each stage divided for it."""

    def __init__(self, stages: StageDivisions) -> None:
        super().__init__(stages.views)
        self.stages = stages

    def views_of(self, division: Division) -> Views | None:
        return self.stages.of(division)


def start(plan: Plan, mesh: int, views: Views) -> Division:
    """The division of a plan all of whose stages have this mesh."""
    ranks = tuple(tuple(team.leader for team in stage.teams) for stage in plan.stages)
    found = Division.of(plan, views.request.planning)
    return found._replace(ranks=ranks, meshes=(mesh,) * len(ranks))


class Found(NamedTuple):
    """The best division, how it sees the model, and how many plans were made."""

    trial: Trial
    views: Views
    plans: int


def best_plan(
    views: Views, profile: Profile, starts: Sequence[Division], by_stage: bool = True
) -> Found | None:
    """The fastest division found from these: first with the operators of the whole model divided,
    then, `by_stage`, from the best with those of each stage, if there are not many devices. None if
    none of them can be simulated and fits.
    """
    trials = MeshTrials(views)
    found = best_divisions(trials, starts)
    if not by_stage or views.request.has_many_devices:
        return Found(found[0], views, trials.plans) if found else None
    again = DividedTrials(StageDivisions(views, profile))
    better = best_divisions(again, list(dict.fromkeys(each.division for each in found)))
    plans = trials.plans + again.plans
    if better and better[0].seconds < found[0].seconds * (1 - _BETTER):
        own = again.views_of(better[0].division)
        assert own is not None
        return Found(better[0], own, plans)
    return Found(found[0], views, plans) if found else None


def best_divisions(trials: MeshTrials, starts: Sequence[Division]) -> list[Trial]:
    """The fastest divisions found from these, the best first; none if none of these can be
    simulated and fits.
    """
    views, request = trials.views, trials.request
    tried = (trials.tried(division) for division in starts)
    fitting = [trial for trial in tried if trial is not None and trial.fits]
    if not fitting:
        return []
    fitting.sort(key=lambda trial: trial.seconds)
    around = MeshSteps(request.planning, request.cluster, [each.devices for each in views.views])

    def steps(division: Division) -> Iterator[tuple[Division, float]]:
        yield from ((other, _WORTH_MEMORY) for other in Neighbours.in_flight(division))
        yield from ((other, _BETTER) for other in around.of(division))

    if request.has_many_devices:
        return [climb(fitting[0], trials, steps, trials.spent + _BUDGET)]
    climbed = [climb(each, trials, steps, trials.spent + _BUDGET) for each in fitting[:_STARTS]]
    most = trials.spent + _BUDGET
    explored = best_first([*climbed, *fitting], trials, around.of, most, _WORTH_EXPLORING)
    explored = _with_more_in_flight(explored, trials, trials.spent + _BUDGET)
    best = climb(explored, trials, steps, trials.spent + _BUDGET)
    return [best, *(each for each in climbed if each is not best)]


def _with_more_in_flight(best: Trial, trials: MeshTrials, most: int) -> Trial:
    """The best of all that is known with as many minibatches in flight as help it, the fastest
    first, until `most` is spent. What they gain has no limit but the bound: behind slow links a
    round trip of a minibatch takes many times as long as a stage.
    """
    known = (trial for trial in trials.known.values() if trial is not None and trial.fits)
    for trial in sorted(known, key=lambda each: each.seconds):
        if trials.spent > most:
            break
        if trial.bound < best.seconds:
            settled = trials.settle(trial.division)
            best = min(best, settled or best, key=lambda each: each.rank)
    return best


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

"""Chooses the plan that is fastest in the simulator, within the limits of the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipedream.graph.errors import UserError
from pipedream.optimizer.choose.bound import lower_bound
from pipedream.optimizer.choose.candidates import candidates
from pipedream.optimizer.choose.division import Division
from pipedream.optimizer.choose.expected import with_expected
from pipedream.optimizer.choose.neighbours import Neighbours
from pipedream.optimizer.choose.trial import Trial, Trials
from pipedream.optimizer.search.outcome import Outcome, placed_outcome
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request

_SPENT = 400_000
"""Actions simulated, about, from each of the best candidates: about a second."""

_STARTS = 4
"""So many of the best candidates are improved."""

_BETTER = 1e-4
"""Relative gain below which a step is none."""


@dataclass(frozen=True)
class Choice:
    """The plan chosen, its simulation, and the best candidates by name, the fastest first."""

    outcome: Outcome
    best: Trial
    candidates: Sequence[tuple[str, Trial]]


def best_plan(request: Request) -> Outcome:
    """The plan to write: chosen by simulation, or by the cost model if that is one of another kind.

    Raises UserError if no plan fits the memory.
    """
    return choose(request).outcome if request.cost_model.prices_plans else optimize(request)


def choose(request: Request) -> Choice:
    """Raises UserError if no plan fits the memory."""
    trials, found = Trials(request), []
    for name, division in candidates(request):
        try:
            trial = trials.try_out(division)
        except UserError:
            continue
        if trial is not None and trial.fits:
            found.append((name, trial))
    if not found:
        optimize(request)  # says why
        raise AssertionError("a plan that fits and cannot be simulated")
    found.sort(key=lambda each: each[1].seconds)
    best = found[0][1]
    steps = Neighbours(request.planning, request.cluster, request.rules.straight)
    for start in _distinct([trial for _, trial in found])[:_STARTS]:
        improved = climb(start, trials, steps, trials.spent + _SPENT)
        best = min(best, improved, key=lambda each: each.seconds)
    return Choice(_outcome(request, best), best, found)


def _distinct(trials: Sequence[Trial]) -> list[Trial]:
    return list({trial.division: trial for trial in trials}.values())


def climb(start: Trial, trials: Trials, steps: Neighbours, most: int) -> Trial:
    """The best division that steps lead to, each to a faster one, until `most` is spent."""
    best, improved = start, True
    while improved:
        improved = False
        for division in steps.of(best.division):
            if trials.spent > most:
                return best
            within = best.seconds * (1 - _BETTER)
            trial = _tried(division, trials, within)
            if trial is not None and trial.seconds < within:
                best, improved = trial, True
                break
    return best


def _tried(division: Division, trials: Trials, within: float) -> Trial | None:
    try:
        return trials.try_out(division, within)
    except UserError:
        return None


def _outcome(request: Request, best: Trial) -> Outcome:
    division = best.division
    memory = request.memory_model(division.cuts(request.planning))
    placed = division.placed(request.cluster)
    outcome = placed_outcome(memory, request, placed, lower_bound(request), more=division.more)
    goal = request.latency
    if goal is not None:
        outcome = outcome.predicting(
            objective="latency",
            microbatches=goal.microbatches,
            latency_seconds=goal.microbatches * outcome.plan.predicted.seconds_per_minibatch,
            latency_lower_bound_seconds=goal.microbatches
            * outcome.plan.predicted.lower_bound_seconds,
        )
    outcome = replace(outcome, plan=best.simulation.noted_in(outcome.plan))
    return with_expected(outcome, request)

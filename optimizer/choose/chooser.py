"""Chooses the plan that is fastest in the simulator, within the limits of the request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from pipedream.graph.choices import BEST_ORDER, DEFAULT_ORDER, ScheduleName
from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan
from pipedream.graph.units import show_bytes
from pipedream.optimizer.choose.bound import lower_bound
from pipedream.optimizer.choose.candidates import DATA_PARALLEL, candidates, data_parallel
from pipedream.optimizer.choose.division import Division, in_order
from pipedream.optimizer.choose.expected import expected
from pipedream.optimizer.choose.local_search import WorthSteps, best_first, climb
from pipedream.optimizer.choose.neighbours import Neighbours
from pipedream.optimizer.choose.ordered import best_ordered_plan
from pipedream.optimizer.choose.placed_trials import PlacedTrials
from pipedream.optimizer.choose.trial import Trial
from pipedream.optimizer.search.outcome import (
    Outcome,
    Rival,
    ScheduleTime,
    placed_outcome,
)
from pipedream.optimizer.search.planner import check, optimize
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.search.split import Split

_BUDGET = 300_000
"""Actions simulated, about, from each of the best candidates: about a second."""

_BUDGET_OF_GROUPS = 2 * _BUDGET
"""The same where stages end between groups: there are fewer places to end, so that a search passes
by more of the good plans that it could have gone on to.
"""

_BUDGET_OF_OTHERS = 100_000
"""The same under each schedule that was not asked for."""

_SCHEDULES: tuple[ScheduleName, ...] = ("weight-stashing", "2bw", "flush")
"""2bw before flush: it says how many minibatches of an update it needs."""

_STARTS = 4
"""So many of the best candidates are improved."""

_BETTER = 1e-4
"""Relative gain below which a step is none."""

_WORTH_MEMORY = 0.01
"""The same for more minibatches in flight, which cost memory."""

_WORTH_EXPLORING = 1.25
"""Divisions that take so many times as long as the best may lead to a better one."""

_RIVALS = 5


def best_plan(request: Request) -> Outcome:
    """The plan to write: chosen by simulation, or by a formula if the cost model is one.

    Raises UserError if no plan fits the memory.
    """
    if request.order not in (None, DEFAULT_ORDER):
        return _in_an_order(request)
    return choose(request) if request.cost_model.prices_plans else optimize(request)


def _in_an_order(request: Request) -> Outcome:
    """The best plan in the order of the request, beside what 1f1b and other schedules would take;
    where any order will do, that of 1f1b if it is faster.
    """
    try:
        plain = choose(replace(request, order=None, stages_each=None))
    except UserError:
        return best_ordered_plan(request)
    ordered = best_ordered_plan(request)
    plain_time, ordered_time = ScheduleTime.of(plain.plan), ScheduleTime.of(ordered.plan)
    beside = plain_time, *ordered.schedules, *plain.schedules
    if request.order == BEST_ORDER and plain_time.seconds < ordered_time.seconds:
        return replace(plain, schedules=(ordered_time, *beside[1:]))
    return replace(ordered, schedules=beside).predicting(
        data_parallel_seconds=plain.plan.predicted.data_parallel_seconds
    )


def choose(request: Request) -> Outcome:
    """The fastest plan that was found. Raises UserError if no plan fits the memory."""
    check(request)
    if request.split is not None:
        return _with_split(request, request.split)
    trials = PlacedTrials(request)
    named = list(_named_trials(request, trials))
    fitting = list({trial.division: trial for _, trial in named if trial.fits}.values())
    if not fitting:
        # Either nothing fits, which the search then says, or all of it takes long to simulate.
        return optimize(request)
    fitting.sort(key=lambda trial: trial.seconds)
    neighbours = Neighbours(request.planning, request.cluster, request.rules.straight)
    steps = _steps(neighbours)
    starts = fitting[: 1 if request.has_many_devices else _STARTS]
    budget = _BUDGET_OF_GROUPS if request.groups else _BUDGET
    climbed = [climb(start, trials, steps, trials.spent + budget) for start in starts]
    best = climbed[0]
    if not request.has_many_devices:
        most = trials.spent + budget
        explored = best_first([*climbed, *fitting], trials, neighbours.of, most, _WORTH_EXPLORING)
        best = climb(explored, trials, steps, trials.spent + budget)
    divisions = [best.division, *(start.division for start in starts)]
    return replace(
        _outcome(request, best, trials),
        rivals=tuple(_rivals(named, best)),
        schedules=tuple(_under_others(request, divisions, neighbours)),
    )


def outcome_at(request: Request, division: Division) -> Outcome | None:
    """The outcome of this division; None if it does not fit or takes too long to simulate."""
    trials = PlacedTrials(request)
    trial = trials.tried(division)
    return _outcome(request, trial, trials) if trial is not None and trial.fits else None


def _with_split(request: Request, split: Split) -> Outcome:
    """The plan with the user's stages, whether or not they fit, and what they would take under
    other schedules. Raises UserError if the schedule does not allow them.
    """
    graph, devices = request.planning, request.cluster.devices
    if sum(split.replicas) > devices:
        raise UserError(
            f"--split: {len(split.replicas)} stages of {', '.join(map(str, split.replicas))}"
            f" workers, and there are {devices} of them: give more --machines, or fewer stages or"
            " --replicas"
        )
    request.check_shared(split.ends(graph), split.replicas)
    division = Division(split.downsets(graph), in_order(split.replicas))
    trials = PlacedTrials(request)
    trial = trials.settle(division)
    if trial is None:
        raise UserError("--split: it takes too long to simulate: give fewer stages or devices")
    outcome = _outcome(request, trial, trials)
    schedules = tuple(_under_others(request, [division], None))
    return replace(
        outcome, user_split=True, schedules=schedules, notes=_too_large(outcome.plan, request)
    )


def _too_large(plan: Plan, request: Request) -> tuple[str, ...]:
    """The stages that do not fit their devices, in words."""
    types, cluster = request.device_types, request.cluster
    return tuple(
        f"Does not fit: stage {stage.stage} needs {show_bytes(stage.memory_bytes)} of"
        f" {show_bytes(least)}; give --memory more, --recompute always, or another --split."
        for stage in plan.stages
        if stage.memory_bytes > (least := types.worst_of_ranks(stage.ranks, cluster).memory)
    )


def _named_trials(request: Request, trials: PlacedTrials) -> Iterator[tuple[str, Trial]]:
    """The candidates; with more in flight those that may come near the fastest, of many devices the
    fastest alone.
    """
    tried = [
        (name, trial)
        for name, division in candidates(request)
        if (trial := trials.tried(division)) is not None
    ]
    fastest = min((trial.seconds for _, trial in tried), default=0.0)
    for name, trial in tried:
        settled, least = None, trial.seconds if request.has_many_devices else trial.bound
        if least <= fastest * (1 if request.has_many_devices else _WORTH_EXPLORING):
            with suppress(UserError):
                settled = trials.settle(trial.division)
        yield name, settled or trial


def _steps(neighbours: Neighbours) -> WorthSteps:
    """The steps of a climb: more or fewer minibatches in flight first, then other divisions."""

    def steps(division: Division) -> Iterator[tuple[Division, float]]:
        yield from ((other, _WORTH_MEMORY) for other in neighbours.in_flight(division))
        yield from ((other, _BETTER) for other in neighbours.of(division))

    return steps


def _rivals(named: Sequence[tuple[str, Trial]], best: Trial) -> list[Rival]:
    """The candidates that lost, each division once, by the first name it has."""
    first = {trial.division: (name, trial) for name, trial in reversed(named)}
    rivals = [
        Rival(name, division.replicas, trial.fits, trial.simulated, trial.why)
        for division, (name, trial) in reversed(first.items())
        if division != best.division
    ]
    rivals.sort(key=lambda rival: (not rival.fits, rival.seconds))
    last = (rival for rival in rivals[_RIVALS:] if rival.name == DATA_PARALLEL)
    return [*rivals[:_RIVALS], *islice(last, 1)]


def _under_others(
    request: Request, starts: Sequence[Division], neighbours: Neighbours | None
) -> Iterator[ScheduleTime]:
    """The fastest plan found under each of the schedules that people choose between, with as many
    minibatches per update; without `neighbours` it is the fastest of `starts`.
    """
    microbatches = request.settings.microbatches
    for schedule in _SCHEDULES:
        if schedule == request.schedule:
            continue
        changed = replace(
            request,
            schedule=schedule,
            latency=None,
            corrections=frozenset(),
            microbatches=None if schedule == "2bw" else microbatches,
        )
        trials = PlacedTrials(changed)
        tried = (trials.tried(division) for division in starts)
        fitting = [trial for trial in tried if trial is not None and trial.fits]
        if fitting:
            best = min(fitting, key=lambda trial: trial.seconds)
            if neighbours is not None and not request.has_many_devices:
                best = climb(best, trials, _steps(neighbours), trials.spent + _BUDGET_OF_OTHERS)
            count = best.plan.predicted.microbatches
            microbatches = max(microbatches, count or 0)
            yield ScheduleTime(schedule, best.division.replicas, best.seconds, count)


def priced_outcome(request: Request, best: Trial, bound: float) -> Outcome:
    """The outcome of a trial, with what is to be expected in a run; `bound`: seconds per minibatch
    that no division takes less than.
    """
    memory = request.memory_model(best.division.cuts(request.planning))
    placed = best.division.placed(request.cluster)
    outcome = placed_outcome(memory, request, placed, bound, slack=best.division.slack)
    plan = best.simulation.noted_in(outcome.plan)
    in_a_run = None if request.hurried else expected(plan, request)
    outcome = replace(outcome, plan=plan)
    return outcome if in_a_run is None else in_a_run.noted_in(outcome)


def _data_parallel_seconds(
    request: Request, best: Trial, plan: Plan, trials: PlacedTrials
) -> float | None:
    """What data parallelism takes in a run, which may be the plan itself; None if not known."""
    division = data_parallel(request)
    known = plan.predicted.expected_seconds_per_minibatch
    if best.division._replace(slack=0) == division and known is not None:
        return known
    whole = trials.tried(division)
    of_whole = None if whole is None or request.hurried else expected(whole.plan, request)
    return None if of_whole is None else of_whole.seconds


def _outcome(request: Request, best: Trial, trials: PlacedTrials) -> Outcome:
    bound = lower_bound(request)
    outcome = replace(priced_outcome(request, best, bound), considered=trials.plans)
    plan = outcome.plan
    figures: dict[str, object] = {}
    seconds = _data_parallel_seconds(request, best, plan, trials)
    if seconds is not None:
        figures["data_parallel_seconds"] = seconds
    if request.latency is not None:
        batch, predicted = request.latency.microbatches, plan.predicted
        figures |= {
            "objective": "latency",
            "microbatches": batch,
            "latency_seconds": batch * predicted.seconds_per_minibatch,
            "latency_lower_bound_seconds": batch * predicted.lower_bound_seconds,
        }
    return outcome.predicting(**figures)

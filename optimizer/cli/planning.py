"""Planning of a task, with workers of one device and on meshes."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf

from pipedream.graph.errors import UserError
from pipedream.graph.placements.placement import Mesh, device_count
from pipedream.optimizer.choose.bound import shared_out
from pipedream.optimizer.choose.chooser import outcome_at
from pipedream.optimizer.choose.tied import plan_shared
from pipedream.optimizer.choose.trial import Trial
from pipedream.optimizer.cli.asked.operators import parse_mesh
from pipedream.optimizer.cli.cluster_options import named
from pipedream.optimizer.cli.like import recorded_options
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.cli.task import Task
from pipedream.optimizer.compare.batch_sizes import Choices
from pipedream.optimizer.compare.considered import Considered
from pipedream.optimizer.compare.scaled import Scaled
from pipedream.optimizer.search.outcome import Outcome
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.sharding.least_work import least_seconds
from pipedream.optimizer.sharding.mesh_search import Found, best_plan, outcome_of, start
from pipedream.optimizer.sharding.meshes import are_alike, meshes
from pipedream.optimizer.sharding.table import beside
from pipedream.optimizer.sharding.views import Views
from pipedream.optimizer.simulate.simulation import Simulation
from pipedream.optimizer.simulate.simulator import MOST_MOVES, QUICK_MOVES

_WORTH_A_MESH = 0.99
"""Of the seconds of the best plan so far: a mesh that is no faster than this is not worth it."""

_WORTH_SOLVING = 0.96
"""The same with --intra-op auto: if nothing can be faster than this, no shardings are sought."""

_HOPEFUL = 1 / 1.2
"""The same for all work of a mesh, shared out evenly, where there are many devices: pipelines of
these take at least so many times as long. Meshes of more devices, with more messages, are then not
tried.
"""


@dataclass(frozen=True)
class Planning:
    """The best plan for some options, and the task that it solves, under the schedule that was
    chosen; `simulation`: None if that takes too long; `choices`: by batch size, if there were
    several; `others`: the best for other kinds of workers, if several were tried; `considered`:
    what else an update of --global-batch could be; `scaled`: other numbers of machines.
    """

    options: Options
    task: Task
    outcome: Outcome
    simulation: Simulation | None
    choices: Choices | None = None
    others: tuple[Planning, ...] = ()
    considered: tuple[Considered, ...] = ()
    scaled: tuple[Scaled, ...] = ()

    @property
    def other_workers(self) -> tuple[Planning, ...]:
        """The best for other kinds of workers; beside a mesh at least that of single devices, if
        there is one.
        """
        if self.others or not self.task.shardings:
            return self.others
        with suppress(UserError):
            return (_plan_workers(self.task.on_devices(), self.options),)
        return ()

    @property
    def on_operators(self) -> Planning | None:
        """Beside a plan of groups, that of single devices whose stages may end after any operator,
        if there is one.
        """
        if self.options.group == "none":
            return None
        with suppress(UserError):
            return _plan_workers(self.task.on_operators, self.options)
        return None

    def planned_for(self, request: Request) -> Outcome:
        """The outcome of the same task for workers of another cluster. Raises UserError."""
        options = replace(self.options, timeline=False, compare=False)
        alone = self.task.on_devices(request)
        if options.mesh is None:
            return plan_task(alone, options).outcome
        on_mesh = alone.on_mesh(parse_mesh(options.mesh), options.shard, options.intra_op)
        return plan_task(on_mesh, options).outcome


@contextmanager
def quick_collector() -> Iterator[None]:
    """Collects garbage less often inside: planning makes millions of long-lived objects and hardly
    any cycles, and with the default thresholds it takes a tenth longer.
    """
    before = gc.get_threshold()
    gc.set_threshold(200_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def plan_task(task: Task, options: Options) -> Planning:
    """Plans with workers of one device, and on meshes where operators may be divided: the best."""
    if task.operators is None or task.sharding is not None:
        return _plan_workers(task, options)
    plain: Planning | UserError
    try:
        plain = _plan_workers(task, options)
    except UserError as error:
        plain = error
    return best_on_meshes(plain, task, options)


def best_on_meshes(plain: Planning | UserError, task: Task, options: Options) -> Planning:
    """The best of plans with workers of one device and of meshes, with what the others take. Raises
    UserError if there is none.
    """
    assert task.operators is not None
    best = None if isinstance(plain, UserError) else plain
    alone = _seconds_at_most(plain)
    least = least_seconds(task.request, task.operators)
    tried: dict[Mesh, float] = {}
    found: list[Planning] = []
    worth = _WORTH_SOLVING if options.intra_op == "auto" else _WORTH_A_MESH
    hopeful = _HOPEFUL if task.request.has_many_devices else 1.0
    largest = inf
    possible = list(meshes(task.request.cluster)) if are_alike(task.request.cluster) else []
    if possible and least >= alone * worth:
        return _not_divided(best, least, hint=options.intra_op == "auto")
    for mesh in possible:
        if device_count(mesh) >= largest:
            continue
        with suppress(UserError):  # nothing to divide, or too little memory
            on_mesh = task.on_mesh(mesh, (), options.intra_op)
            most = inf if best is None else seconds_of(best) * hopeful
            if shared_out(on_mesh.request) >= most:
                largest = device_count(mesh) if task.request.has_many_devices else inf
                continue
            planning = _plan_workers(on_mesh, options, play=not on_mesh.request.hurried)
            tried[mesh] = seconds_of(planning)
            found.append(planning)
            if best is None or tried[mesh] < seconds_of(best) * _WORTH_A_MESH:
                best = planning
    if best is None:
        assert isinstance(plain, UserError)
        raise plain
    if not tried:
        return _certified(best, least)
    plain, mixed = _mixed(best, plain, found, task, options)
    alone = _seconds_at_most(plain)
    if mixed is not None and seconds_of(mixed) < alone * _WORTH_A_MESH:
        best = mixed
    elif not isinstance(plain, UserError):
        best = plain  # meshes were faster only as long as nobody looked at what crosses stages
    seconds = seconds_of(best) if best is mixed else None
    outcome = _certified(best, least).outcome
    notes = (*outcome.notes, beside(tried, alone, best.task.shardings, seconds))
    made = [*([] if isinstance(plain, UserError) else [plain]), *found]
    others = tuple(each for each in made if each is not best)
    return replace(best, outcome=replace(outcome, notes=notes), others=others)


def _not_divided(planning: Planning | None, least: float, hint: bool) -> Planning:
    """The plan with workers of one device, with the reason why no others were sought."""
    assert planning is not None
    certified = _certified(planning, least)
    saved = 1 - least / seconds_of(planning)
    note = f"Operators not divided: that could save {saved:.1%} at most, if it took no messages"
    note += "; --intra-op exact seeks it." if hint else "."
    outcome = certified.outcome
    return replace(certified, outcome=replace(outcome, notes=(*outcome.notes, note)))


def _certified(planning: Planning, least: float) -> Planning:
    """With `least` as the bound, where that of workers of one device is higher."""
    bound = min(seconds_of(planning), least, planning.outcome.plan.predicted.lower_bound_seconds)
    return replace(planning, outcome=planning.outcome.predicting(lower_bound_seconds=bound))


def _chosen(
    best: Planning,
    plain: Planning | UserError,
    found: Sequence[Planning],
    task: Task,
    options: Options,
) -> Found | None:
    """The best of plans whose stages may have different meshes, or none, from the plans of one mesh
    for all, in the schedule of the `best` of these; None if none can be simulated or fits.
    """
    alone = replace(task.request, schedule=best.task.request.schedule)
    meshed = [(each.task.sharding, each.task.request) for each in found]
    views = Views.of(alone, [(own, teams) for own, teams in meshed if own is not None])
    plans = [each.outcome.plan for each in found]
    starts = [start(plan, number, views) for number, plan in enumerate(plans, start=1)]
    if not isinstance(plain, UserError):
        starts.append(start(plain.outcome.plan, 0, views))
    assert task.profile is not None
    return best_plan(views, task.profile, starts, options.intra_op in ("auto", "exact"))


def _improved(plain: Planning, trial: Trial, options: Options) -> Planning:
    """The plan with workers of one device, or another such that was found beside meshes."""
    outcome = outcome_at(plain.task.request, trial.division._replace(meshes=()))
    if outcome is None:
        return plain
    before = plain.outcome
    kept = replace(
        outcome,
        rivals=before.rivals,
        schedules=before.schedules,
        notes=before.notes,
        considered=before.considered + outcome.considered,
    )
    other = planning_of(plain.task, options, kept)
    return min(plain, other, key=seconds_of)


def _mixed(
    best: Planning,
    plain: Planning | UserError,
    found: Sequence[Planning],
    task: Task,
    options: Options,
) -> tuple[Planning | UserError, Planning | None]:
    """The plan with workers of one device, or a better one that was found beside meshes, and the
    best plan whose stages may have different meshes, if that has any.
    """
    chosen = _chosen(best, plain, found, task, options)
    if chosen is None:
        return plain, None
    if any(chosen.trial.division.meshes):
        return plain, _on_meshes(chosen, best, found, task, options)
    if isinstance(plain, UserError):
        return plain, None
    return _improved(plain, chosen.trial, options), None


def _on_meshes(
    chosen: Found, best: Planning, found: Sequence[Planning], task: Task, options: Options
) -> Planning:
    assert task.operators is not None
    alone = replace(task.request, schedule=best.task.request.schedule)
    trial, views = chosen.trial, chosen.views
    request, outcome = outcome_of(trial, views, least_seconds(alone, task.operators))
    most_moves = MOST_MOVES if options.timeline else QUICK_MOVES
    simulation = request.simulate(outcome.plan, most_moves)
    recorded = recorded_options(options, request.footprints is not None)
    plan = outcome.plan.model_copy(update={"asked": recorded, **task.measured_for})
    others = best.outcome
    outcome = replace(
        outcome,
        plan=plan,
        schedules=others.schedules,
        notes=others.notes,
        considered=chosen.plans + sum(each.outcome.considered for each in found),
    )
    solved = replace(task, request=request, undivided=alone, views=views, division=trial.division)
    return Planning(options, solved, solved.expanded(outcome), simulation)


def _seconds_at_most(plain: Planning | UserError) -> float:
    return inf if isinstance(plain, UserError) else seconds_of(plain)


def seconds_of(planning: Planning) -> float:
    """Seconds per minibatch of the plan, simulated if that was possible."""
    predicted = planning.outcome.plan.predicted
    simulated = predicted.simulated
    return predicted.seconds_shared_out if simulated is None else simulated.seconds_per_minibatch


def _plan_workers(task: Task, options: Options, play: bool = True) -> Planning:
    """Plans for the workers of the task; `play` as in `planning_of`."""
    try:
        request, outcome, notes = plan_shared(task.request, task.any_schedule)
    except MemoryError as error:
        raise UserError(
            f"{named(options)}: not enough memory here to plan for so many devices; give fewer"
        ) from error
    planned = replace(task, request=request)
    return planning_of(planned, options, replace(outcome, notes=(*notes, *outcome.notes)), play)


def planning_of(task: Task, options: Options, outcome: Outcome, play: bool = True) -> Planning:
    """The outcome for the request of the task, with what plan.json records; `play`: and simulated
    as a whole.
    """
    request = task.request
    most_moves = MOST_MOVES if options.timeline or options.compare else QUICK_MOVES
    simulation = request.simulate(outcome.plan, most_moves) if play else None
    best = outcome.plan if simulation is None else simulation.noted_in(outcome.plan)
    recorded = recorded_options(options, request.footprints is not None)
    best = best.model_copy(update={"asked": recorded, **task.measured_for})
    outcome = replace(outcome, plan=best)
    return Planning(options, task, task.expanded(outcome), simulation)

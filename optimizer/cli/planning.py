"""Planning as a function of options: what pd-optimize and `pipedream.optimize` both call."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from pipedream.graph.errors import UserError
from pipedream.graph.placements.placement import Mesh
from pipedream.graph.profile import folder_of, sizes_in
from pipedream.optimizer.calibrate.verdict import Verdict
from pipedream.optimizer.choose.tied import plan_shared
from pipedream.optimizer.cli.cluster_options import named
from pipedream.optimizer.cli.like import recorded_options
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.cli.task import (
    Task,
    make_task,
    parse_mesh,
    with_fitting_mesh,
    with_global_batch,
)
from pipedream.optimizer.compare.batch_sizes import Choice, Choices, check_alike
from pipedream.optimizer.search.outcome import Outcome
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.sharding.least_work import least_seconds
from pipedream.optimizer.sharding.mesh_search import best_plan, outcome_of, start
from pipedream.optimizer.sharding.meshes import are_alike, meshes
from pipedream.optimizer.sharding.table import beside
from pipedream.optimizer.sharding.views import Views
from pipedream.optimizer.simulate.simulation import Simulation
from pipedream.optimizer.simulate.simulator import MOST_MOVES, QUICK_MOVES

_WORTH_A_MESH = 0.99
"""Of the seconds of the best plan so far: a mesh that is no faster than this is not worth it."""


@dataclass(frozen=True)
class Planning:
    """The best plan for some options, and the task that it solves, under the schedule that was
    chosen; `simulation`: None if that takes too long; `choices`: by batch size, if there were
    several; `others`: the best for other kinds of workers, if several were tried.
    """

    options: Options
    task: Task
    outcome: Outcome
    simulation: Simulation | None
    choices: Choices | None = None
    others: tuple[Planning, ...] = ()

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


def plan(options: Options) -> Planning:
    """Plans what the options ask for. Raises UserError for wrong ones, and if there is no plan."""
    if isinstance(options.graph, Path) and (options.graph / "graph.txt").exists():
        options = replace(options, graph=options.graph / "graph.txt")
    options = with_global_batch(options)
    if isinstance(options.graph, Path) and options.graph.is_dir():
        return _plan_by_size(options, options.graph)
    fitting = with_fitting_mesh(options)
    planning = _beside_run(plan_task(make_task(fitting), fitting))
    if fitting is options:
        return planning
    note = f"Teams of --mesh {options.mesh} do not divide the devices: other workers were planned."
    noted = replace(planning.outcome, notes=(note, *planning.outcome.notes))
    return replace(planning, outcome=noted)


def _beside_run(planning: Planning) -> Planning:
    """With the gain on the plan of the newest run that the times were corrected by, if any."""
    known, plan = planning.task.calibration, planning.outcome.plan
    if not known.runs:
        return planning
    now = known.priced(known.runs[-1].measured.plan, planning.task.of_devices)
    verdict = Verdict(known.runs[-1], now, plan)
    gain = 0.0 if verdict.stays else verdict.gain
    return replace(planning, outcome=planning.outcome.predicting(gain=gain))


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
    best = None if isinstance(plain, UserError) else plain
    alone = inf if best is None else _seconds(best)
    tried: dict[Mesh, float] = {}
    found: list[Planning] = []
    for mesh in meshes(task.request.cluster) if are_alike(task.request.cluster) else ():
        with suppress(UserError):  # nothing to divide, or too little memory
            on_mesh = task.on_mesh(mesh, (), options.intra_op)
            if _at_least(on_mesh.request) >= (inf if best is None else _seconds(best)):
                continue
            planning = _plan_workers(on_mesh, options)
            tried[mesh] = _seconds(planning)
            found.append(planning)
            if best is None or tried[mesh] < _seconds(best) * _WORTH_A_MESH:
                best = planning
    if best is None:
        assert isinstance(plain, UserError)
        raise plain
    if not tried:
        return best
    mixed = _mixed(best, plain, found, task, options)
    if mixed is not None and _seconds(mixed) < alone * _WORTH_A_MESH:
        best = mixed
    elif best.task.sharding is not None and not isinstance(plain, UserError):
        best = plain  # faster only as long as what crosses between stages is not looked at
    seconds = _seconds(best) if best is mixed else None
    assert task.operators is not None
    bound = min(_seconds(best), least_seconds(task.request, task.operators))
    outcome = best.outcome.predicting(
        lower_bound_seconds=min(bound, best.outcome.plan.predicted.lower_bound_seconds)
    )
    notes = (*outcome.notes, beside(tried, alone, best.task.shardings, seconds))
    made = [*([] if isinstance(plain, UserError) else [plain]), *found]
    others = tuple(each for each in made if each is not best)
    return replace(best, outcome=replace(outcome, notes=notes), others=others)


def _mixed(
    best: Planning,
    plain: Planning | UserError,
    found: Sequence[Planning],
    task: Task,
    options: Options,
) -> Planning | None:
    """The best plan whose stages may have different meshes, from the plans of one mesh for all, in
    the schedule of the `best` of these; None if none can be simulated or fits.
    """
    schedule = best.task.request.schedule
    alone = replace(task.request, schedule=schedule)
    meshed = [(each.task.sharding, each.task.request) for each in found]
    views = Views.of(alone, [(own, teams) for own, teams in meshed if own is not None])
    plans = [each.outcome.plan for each in found]
    starts = [start(plan, number, views) for number, plan in enumerate(plans, start=1)]
    if not isinstance(plain, UserError):
        starts.append(start(plain.outcome.plan, 0, views))
    assert task.operators is not None
    assert task.profile is not None
    chosen = best_plan(views, task.profile, starts, options.intra_op in ("auto", "exact"))
    if chosen is None or not any(chosen.trial.division.meshes):
        return None
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


def _at_least(request: Request) -> float:
    """Seconds per minibatch of all work, shared out evenly."""
    cluster = request.cluster
    speeds = sum(cluster.device(rank).speed for rank in range(cluster.devices))
    return float(request.planning.compute_seconds.sum()) / speeds


def _seconds(planning: Planning) -> float:
    predicted = planning.outcome.plan.predicted
    simulated = predicted.simulated
    return predicted.seconds_shared_out if simulated is None else simulated.seconds_per_minibatch


def _plan_workers(task: Task, options: Options) -> Planning:
    """Plans for the workers of the task."""
    try:
        request, outcome, notes = plan_shared(task.request, task.any_schedule)
    except MemoryError as error:
        raise UserError(
            f"{named(options)}: not enough memory here to plan for so many devices; give fewer"
        ) from error
    most_moves = MOST_MOVES if options.timeline or options.compare else QUICK_MOVES
    simulation = request.simulate(outcome.plan, most_moves)
    best = outcome.plan if simulation is None else simulation.noted_in(outcome.plan)
    recorded = recorded_options(options, request.footprints is not None)
    best = best.model_copy(update={"asked": recorded, **task.measured_for})
    solved = replace(task, request=request)
    outcome = replace(outcome, plan=best, notes=(*notes, *outcome.notes))
    return Planning(options, solved, solved.expanded(outcome), simulation)


def _plan_by_size(options: Options, folder: Path) -> Planning:
    """Plans for each batch size in the folder; returns the best one's plan. Raises UserError."""
    by_size = options_by_size(options)
    tasks = _tasks(by_size, folder)
    planned: dict[int, Planning] = {}

    def choice(size: int) -> Choice:
        if size not in tasks:
            return Choice(None, None, size, f"does not divide {options.global_batch}")
        try:
            planned[size] = plan_task(tasks[size][1], tasks[size][0])
        except UserError as error:
            return Choice(None, error.format_message(), size)
        return Choice(planned[size].outcome.plan, None, size)

    choices = Choices(tuple(map(choice, by_size)), options.global_batch)
    if not choices.planned:
        raise UserError(f"no batch size has a plan; {choices.problems[0]}")
    return replace(planned[choices.best.batch_size], choices=choices)


def options_by_size(options: Options) -> dict[int, Options | None]:
    """The options for each batch size in the folder GRAPH, smallest first; None for sizes that do
    not divide --global-batch.

    Raises UserError if options contradict each other, or there is no size to plan for.
    """
    folder, whole = options.graph_path, options.global_batch
    _check_by_size(options)
    by_size: dict[int, Options | None] = {}
    for size in sizes_in(folder):
        count = options.microbatches if whole is None else whole // size
        graph = folder_of(folder, size) / "graph.txt"
        changed = replace(options, graph=graph, profile=None, microbatches=count)
        by_size[size] = changed if whole is None or whole % size == 0 else None
    if not by_size:
        raise UserError(
            f"{folder}: no profiles of batch sizes here, as pd-profile --batch-sizes makes them:"
            " name such a folder, or a graph.txt"
        )
    if not any(by_size.values()):
        sizes = ", ".join(map(str, by_size))
        raise UserError(f"--global-batch {whole}: is not a multiple of any batch size ({sizes})")
    return by_size


def _check_by_size(options: Options) -> None:
    folder = options.graph_path
    if options.calibrate:
        raise UserError(
            f"--calibrate: a run has one batch size: name the graph.txt of that one in {folder}"
        )
    if options.again:
        raise UserError(f"--again: name the graph.txt of one batch size in {folder}")
    if "profile" in options.typed:
        raise UserError(f"--profile: in {folder} each batch size has its own: leave it out")
    if options.output is not None and options.output.resolve() == folder.resolve():
        raise UserError(f"-o {folder}: this is the profile folder: choose another")
    if options.global_batch is not None and "microbatches" in options.typed:
        raise UserError(
            "--global-batch and --microbatches both set the examples per update: give one of them"
        )


def _tasks(by_size: Mapping[int, Options | None], folder: Path) -> dict[int, tuple[Options, Task]]:
    """Makes the task of each batch size. Raises UserError if they are not of one model."""
    tasks = {}
    for size, options in by_size.items():
        if options is None:
            continue
        task = make_task(options)
        if task.batch_size not in (None, size):
            raise UserError(
                f"{options.profile_path}: batch_size is {task.batch_size}, but the folder's name"
                f" says {size}: profile this size again"
            )
        tasks[size] = options, replace(task, batch_size=size)
    check_alike({size: task.profiled for size, (_, task) in tasks.items()}, folder)
    return tasks

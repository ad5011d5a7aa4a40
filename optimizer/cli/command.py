"""`pd-optimize`: decides which part of a model runs where."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from pipedream.graph.command import Calculation
from pipedream.graph.errors import UserError
from pipedream.optimizer.cli.cluster_options import bytes_of, cluster_of, named
from pipedream.optimizer.cli.options import Options, with_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipedream.graph.cluster import Cluster
    from pipedream.graph.model import Graph
    from pipedream.graph.plan import Plan
    from pipedream.graph.profile import Profile, TrainingOverheads
    from pipedream.optimizer.calibrate.runs import CalibrationRun
    from pipedream.optimizer.compare.batch_sizes import Choices
    from pipedream.optimizer.search.latency import Latency
    from pipedream.optimizer.search.outcome import Outcome
    from pipedream.optimizer.search.request import Request
    from pipedream.optimizer.simulate.simulation import Simulation


@click.command("pd-optimize", cls=Calculation)
@with_options
def main(**values: Any) -> None:
    """Plans the model of GRAPH (a graph.txt of pd-profile) for a cluster.

    Writes plan.json for pd-train, graph.txt with a stage for each node, and its picture.

    GRAPH may be a folder of pd-profile --batch-sizes: it plans for each size, and chooses.
    """
    # Importing and planning make millions of objects that live on, and hardly a cycle: looking for
    # cycles as often as usual takes a tenth of the time. Nor is there work for threads of numpy's.
    gc.set_threshold(200_000)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    options = Options(**values)
    _check_global_batch(options)
    choices: Choices | None = None
    if options.graph.is_dir():
        choices, options, task, outcome, simulation = _choose(options)
    else:
        task = _task(options)
        outcome, simulation = _plan(task, options)

    from pipedream.optimizer.report import print_report

    print_report(outcome, task.request.graph)
    if task.runs:
        _judge(task, outcome.plan)
    _write(outcome.plan, task.request, options.folder, simulation if options.timeline else None)
    for framework in options.exports:
        _export(framework, outcome.plan, task, options.folder)
    if task.numbers is not None:
        _sweep(task.request, task.numbers, options.folder)
    if options.compare:
        microbatches = options.microbatches or 4 * task.request.cluster.devices
        _compare(task.request, microbatches, options.folder)
    if choices is not None:
        _write_choices(choices, options.folder)


@dataclass(frozen=True)
class _Task:
    """What the options ask for. `numbers` of workers to sweep over; the graph's `profile`, where
    there is one; `runs` by which the graph was calibrated, the newest last, and the graph as it
    was `profiled`, at that `batch_size`; None where no profile says it.
    """

    request: Request
    numbers: range | None
    profile: Profile | None
    runs: Sequence[CalibrationRun]
    profiled: Graph
    batch_size: int | None


def _task(options: Options) -> _Task:
    """Raises UserError: whatever can be found wrong is, before the planning that takes time."""
    cluster = cluster_of(options)
    limit = None if options.memory is None else bytes_of("--memory", options.memory)
    aim = _latency(options)
    in_rounds = _in_rounds(options)
    typed = options.update_rate
    rate = None if typed is None else bytes_of("--update-rate", typed)
    numbers = None if options.sweep is None else _numbers(options.sweep, cluster)
    _check_folder(options)
    _check_profile(options)

    from pipedream.graph.model import read_graph
    from pipedream.graph.profile import TrainingOverheads
    from pipedream.optimizer.calibrate.runs import CalibrationRun
    from pipedream.optimizer.cost.models import COST_MODELS, default_cost_model
    from pipedream.optimizer.search.request import Request
    from pipedream.optimizer.search.stages import Rules
    from pipedream.optimizer.simulate.workload import UPDATE_RATE

    profiled = read_graph(options.graph)
    runs = [CalibrationRun.read(folder) for folder in options.calibrate]
    profile = _profile(options, profiled)
    footprints = None if profile is None else profile.footprints
    overheads = profile.training_overheads if profile and footprints else None
    graph = _calibrated(profiled, runs, options, profile, overheads)
    schedule = options.schedule or ("weight-stashing" if aim is None else "flush")
    if options.weight_prediction and schedule != "weight-stashing":
        raise UserError(
            f"--weight-prediction is for weight-stashing, and the schedule is {schedule}: leave one"
            " of them out"
        )
    cost_model = options.cost_model or default_cost_model(cluster)
    request = Request(
        graph=graph,
        cluster=cluster,
        model=COST_MODELS[cost_model](options.activation_compression),
        schedule=schedule,
        memory=limit,
        rules=Rules(options.straight, options.fewer_machines),
        latency=aim,
        optimizer=options.optimizer,
        recompute=options.recompute,
        in_flight=options.in_flight,
        update_rate=rate
        or (overheads or TrainingOverheads({})).update_rates.get(options.optimizer, UPDATE_RATE),
        overheads=overheads,
        footprints=footprints,
        microbatches=options.microbatches if in_rounds else None,
        weight_prediction=options.weight_prediction,
    )
    size = None if profile is None else profile.batch_size
    return _Task(request, numbers, profile, runs, profiled, size)


def _calibrated(
    graph: Graph,
    runs: Sequence[CalibrationRun],
    options: Options,
    profile: Profile | None,
    overheads: TrainingOverheads | None,
) -> Graph:
    """With its times as the runs have them. Raises UserError."""
    from pipedream.optimizer.calibrate.runs import calibrated

    if not runs:
        return graph
    for run in runs:
        run.check(graph, options.graph, options.made, profile)
    return calibrated(graph, runs, profile, overheads)


def _judge(task: _Task, plan: Plan) -> None:
    """Prints what the runs have shown, and of the newest one's plan how good it is beside this."""
    from pipedream.optimizer.calibrate.verdict import Verdict, print_runs, print_verdict
    from pipedream.optimizer.cost.price_plan import price_plan

    run, request = task.runs[-1], task.request
    print_runs(task.runs, task.profiled, request.overheads)
    now = price_plan(run.measured.plan, request)
    print_verdict(Verdict(run, now, plan))


def _in_rounds(options: Options) -> bool:
    """Whether the schedule that was asked for makes an update of --microbatches; UserError where
    nothing does.
    """
    from pipedream.schedule.policy import same_everywhere

    found = options.schedule is not None and same_everywhere(options.schedule)
    of_none = not (found or options.compare or options.objective == "latency")
    if of_none and options.microbatches is not None:
        raise UserError(
            "--microbatches is of --objective latency, and of --schedule flush, gpipe and 2bw: add"
            " one of these, or leave it out"
        )
    return found


def _plan(task: _Task, options: Options) -> tuple[Outcome, Simulation | None]:
    """The best plan, its simulated figure where it was simulated, and what it was made with."""
    from pipedream.optimizer.cli.like import asked
    from pipedream.optimizer.search.planner import optimize
    from pipedream.optimizer.simulate.simulator import MOST_MOVES, QUICK_MOVES, simulate_plan

    try:
        outcome = optimize(task.request)
    except MemoryError as error:
        raise UserError(
            f"{named(options)}: not enough memory here to plan for so many devices; give fewer"
        ) from error
    simulation = simulate_plan(
        outcome.plan,
        task.request.graph,
        update_rate=task.request.update_rate,
        overheads=task.request.overheads,
        most_moves=MOST_MOVES if options.timeline else QUICK_MOVES,
    )
    if simulation is not None:
        outcome = replace(outcome, plan=simulation.noted_in(outcome.plan))
    known = asked(options, task.request.footprints is not None)
    noted = {"asked": known, "batch_size": task.batch_size}
    return replace(outcome, plan=outcome.plan.model_copy(update=noted)), simulation


def _check_global_batch(options: Options) -> None:
    """Raises UserError where it means nothing."""
    if options.global_batch is None:
        return
    if not options.graph.is_dir():
        raise UserError(
            f"--global-batch: {options.graph} is of one batch size: name a folder of pd-profile"
            " --batch-sizes, or give --microbatches"
        )
    if options.objective != "latency" and not _in_rounds(replace(options, microbatches=None)):
        raise UserError(
            f"--global-batch: {options.schedule or 'weight-stashing'} updates after every"
            " minibatch: add --schedule flush, gpipe or 2bw, or --objective latency"
        )


def _choose(
    options: Options,
) -> tuple[Choices, Options, _Task, Outcome, Simulation | None]:
    """Plans for each batch size and prints how they compare; what was made for the best of them."""
    from pipedream.optimizer.compare.batch_sizes import (
        Choice,
        Choices,
        options_by_size,
        print_choices,
    )

    asked = options_by_size(options, _typed)
    tasks = _tasks(asked, options.graph)
    made: dict[int, tuple[Outcome, Simulation | None]] = {}

    def choice(size: int) -> Choice:
        if size not in tasks:
            return Choice(size, None, f"does not divide {options.global_batch}")
        try:
            made[size] = _plan(tasks[size][1], tasks[size][0])
        except UserError as error:
            return Choice.without_plan(size, error.message)
        return Choice(size, made[size][0].plan)

    choices = Choices(tuple(map(choice, asked)), options.global_batch)
    print_choices(choices)
    best = choices.best.batch_size
    return choices, *tasks[best], *made[best]


def _tasks(asked: Mapping[int, Options | None], folder: Path) -> dict[int, tuple[Options, _Task]]:
    """What to do at each batch size. Raises UserError where they are not of one model."""
    from pipedream.optimizer.compare.batch_sizes import check_alike

    found = {}
    for size, options in asked.items():
        if options is None:
            continue
        task = _task(options)
        if task.batch_size not in (None, size):
            raise UserError(
                f"{options.made}: batch_size: {task.batch_size}, and {size} by its name"
            )
        found[size] = options, replace(task, batch_size=size)
    check_alike({size: task.profiled for size, (_, task) in found.items()}, folder)
    return found


def _typed(name: str) -> bool:
    """Whether the option of this name stood on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def _write_choices(choices: Choices, folder: Path) -> None:
    """Writes the table of batch sizes as data, and says which was chosen."""
    from pipedream.graph.profile import BATCH_SIZES_TABLE
    from pipedream.optimizer.compare.batch_sizes import choices_frame

    try:
        choices_frame(choices).to_csv(folder / BATCH_SIZES_TABLE, index=False)
    except OSError as error:
        raise UserError(f"-o {folder}: cannot be written: {error.strerror}") from error
    click.echo(f"Written: {folder}/{BATCH_SIZES_TABLE}")
    click.echo(choices.words)


def _numbers(text: str, cluster: Cluster) -> range:
    from pipedream.optimizer.compare.sweep import check_sweep, parse_range

    numbers = parse_range(text)
    check_sweep(cluster, numbers)
    return numbers


def _check_folder(options: Options) -> None:
    """Raises UserError where it cannot be written, as far as that shows before planning."""
    folder = options.folder
    if options.calibrate and folder.resolve() == options.graph.resolve().parent:
        raise UserError(
            f"-o {folder}: {options.graph} is there, and would be lost to the one with corrected"
            " times: name another folder"
        )
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"-o {folder}: cannot be written: {there} is a file; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"-o {folder}: cannot be written: {there} is not yours to write in")


def _check_profile(options: Options) -> None:
    if options.exports and not options.made.exists():
        raise UserError(
            f"--export {options.exports[0]} needs {options.made}: pd-profile writes it with"
            " graph.txt"
        )


def _sweep(request: Request, numbers: range, folder: Path) -> None:
    """Prints the table of --sweep, and writes it as data and as a picture."""
    from pipedream.optimizer.compare.sweep import draw_sweep, sweep, sweep_frame, sweep_table
    from pipedream.optimizer.report import make_console, print_table

    frame = sweep_frame(list(sweep(request, numbers)))
    print_table(make_console(), sweep_table(frame))
    frame.to_csv(folder / "sweep.csv", index=False)
    draw_sweep(frame, folder / "sweep.png")
    click.echo(f"Written: {folder}/sweep.csv, sweep.png")


def _compare(request: Request, microbatches: int, folder: Path) -> None:
    """Prints the table of --compare, and writes it as data and as timelines."""
    from pipedream.optimizer.compare.comparison import (
        compare,
        comparison_frame,
        comparison_table,
        draw_comparison,
    )
    from pipedream.optimizer.report import make_console, print_table

    contenders = compare(request, microbatches)
    print_table(make_console(), comparison_table(contenders, microbatches))
    for contender in contenders:
        if contender.problem is not None:
            click.echo(f"{contender.name}: {contender.problem}")
    comparison_frame(contenders).to_csv(folder / "compare.csv", index=False)
    draw_comparison(contenders, folder / "compare.png")
    click.echo(f"Written: {folder}/compare.csv, compare.png")


def _export(framework: str, plan: Plan, task: _Task, folder: Path) -> None:
    from pipedream.optimizer.export.frameworks import export, write_export

    assert task.profile is not None
    made = export(framework, plan, task.request.graph, task.profile)
    path = folder / f"export-{framework}.json"
    try:
        write_export(made, path)
    except OSError as error:
        raise UserError(f"-o {folder}: cannot be written: {error.strerror}") from error
    click.echo(f"Exported: {path}")
    for note in made.notes:
        click.echo(f"  {note}")


def _latency(options: Options) -> Latency | None:
    """What --objective latency asks for."""
    given = {"--epsilon": options.epsilon, "--layers": options.layers}
    if options.objective == "throughput":
        for option, value in given.items():
            if value is not None:
                raise UserError(f"{option} is of --objective latency: add that, or leave it out")
        return None
    if options.microbatches is None:
        raise UserError("--objective latency: add --microbatches B, how many make one batch")
    if options.schedule not in (None, "flush", "gpipe"):
        raise UserError(
            "--objective latency is of the flush schedule, or gpipe: leave out"
            f" --schedule {options.schedule}"
        )
    from pipedream.optimizer.search.latency import Latency

    return Latency(options.microbatches, options.epsilon or 0.0, options.layers)


def _profile(options: Options, graph: Graph) -> Profile | None:
    """The one that was asked for, or an export needs; else that beside the graph, if it is of this
    one.
    """
    from pipedream.graph.profile import read_profile_of

    if options.profile is None and not options.exports:
        try:
            return read_profile_of(options.made, graph)
        except UserError:
            return None
    profile = read_profile_of(options.made, graph)
    if options.profile is not None and profile.footprints is None:
        raise UserError(f"--profile {options.profile}: has no memory in it: run pd-profile again")
    return profile


def _write(plan: Plan, request: Request, folder: Path, simulation: Simulation | None) -> None:
    """Writes the plan and its pictures: of the simulation, too, where there is one."""
    from pipedream.graph.draw import draw, why_text
    from pipedream.graph.model import format_graph
    from pipedream.graph.plan import write_plan

    staged = request.graph.with_stages(plan.stage_of)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_plan(plan, folder / "plan.json")
        (folder / "graph.txt").write_text(format_graph(staged), encoding="utf-8")
        picture = draw(staged, folder / "graph")
        drawn = "" if simulation is None else _draw(simulation, plan, folder, request.memory)
    except OSError as error:
        raise UserError(f"-o {folder}: cannot be written: {error.strerror}") from error
    why = why_text(staged, picture)
    click.echo(
        f"Written: {folder}/plan.json, graph.txt, {picture.name}"
        + (f" ({why})" if why else "")
        + drawn
    )


def _draw(simulation: Simulation, plan: Plan, folder: Path, memory: float | None) -> str:
    """Writes what --timeline asks for; the files, in words."""
    from pipedream.graph.timeline import draw, draw_memory, write_chrome

    draw(simulation.events, folder / "timeline.png", "simulated schedule")
    write_chrome(simulation.events, folder / "timeline.json", {"memory": simulation.memory})
    stages = [stage.ranks for stage in plan.stages]
    title = "memory of each rank, simulated"
    draw_memory(simulation.memory, stages, folder / "memory.png", title, memory)
    return ", timeline.png, timeline.json, memory.png"


if __name__ == "__main__":
    main()

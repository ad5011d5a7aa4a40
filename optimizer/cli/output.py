"""What planning has to show: the sections of its report, and the files that go with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipedream.graph.model import Graph, format_graph
from pipedream.graph.plan import Plan, plan_text
from pipedream.graph.profile import BATCH_SIZES_TABLE
from pipedream.graph.shown.draw import OTHER, picture, why_text
from pipedream.graph.shown.tables import print_line, print_table
from pipedream.graph.timeline import Panel, chrome_text, memory_png, panels_png
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.optimizer.calibrate.verdict import Verdict, print_runs, print_verdict
from pipedream.optimizer.cli.planning import Planning
from pipedream.optimizer.cli.task import Task
from pipedream.optimizer.compare.batch_sizes import Choices, choices_frame, print_choices
from pipedream.optimizer.compare.comparison import (
    as_contender,
    compare,
    comparison_frame,
    comparison_png,
    comparison_table,
    on_single_devices,
)
from pipedream.optimizer.compare.considered import considered_table
from pipedream.optimizer.compare.scaled import scaled_table
from pipedream.optimizer.compare.sweep import sweep, sweep_frame, sweep_png, sweep_table
from pipedream.optimizer.cuts.groups import classes_of
from pipedream.optimizer.export.frameworks import export
from pipedream.optimizer.report.groups_table import groups_table
from pipedream.optimizer.report.plan_report import print_report
from pipedream.optimizer.report.tables import show_meshes
from pipedream.optimizer.sharding.axes import axis_words
from pipedream.optimizer.sharding.model_sharding import ModelSharding
from pipedream.optimizer.sharding.table import heaviest_table, sharding_table, traffic_table
from pipedream.optimizer.simulate.simulation import Simulation

_MUCH_UNTIMED = 0.1
"""Of a device's work in parts of operators: if so much was not timed, the report says it."""


@dataclass(frozen=True)
class Section:
    """A part of the report, and its files.

    `files`: the content by name, None for one of an earlier plan that has to go; `named`: the line
    that names them, and the folder, which comes after what is shown.
    """

    show: Callable[[Console], None] = lambda console: None
    files: Mapping[str, bytes | None] = field(default_factory=dict)
    named: Callable[[Path], str] | None = None


def sections(planning: Planning) -> Iterator[Section]:
    """Yields the sections once each is made. Raises UserError if an export is not possible."""
    options, task, plan = planning.options, planning.task, planning.outcome.plan
    if planning.choices is not None and not planning.considered:
        choices = planning.choices
        yield Section(lambda console: print_choices(choices, console))
    yield _report(planning)
    for framework in options.export:
        yield from _export(framework, plan, task)
    if task.numbers is not None:
        yield _sweep(planning, task.numbers)
    if options.compare:
        yield _compare(planning)
    if planning.choices is not None:
        yield from _choices(planning.choices)
    yield next_step(plan, "" if task.profile is None else task.profile.model)


def _report(planning: Planning) -> Section:
    """Makes the report of the plan: plan.json, graph.txt and pictures."""
    task, outcome, simulation = planning.task, planning.outcome, planning.simulation
    plan, request = outcome.plan, task.request
    whole = task.of_devices.graph
    modules = None if task.profile is None else task.profile.modules
    staged = _on_devices(request.graph.with_stages(plan.stage_of), plan)
    groups = request.groups
    suffix, image = picture(staged, modules=modules, notes=task.placement_notes, groups=groups)
    files: dict[str, bytes | None] = {
        "plan.json": plan_text(plan).encode(),
        "graph.txt": format_graph(whole.with_stages(plan.stage_of)).encode(),
        f"graph{suffix}": image,
        f"graph{OTHER[suffix]}": None,
    }
    pictures: dict[str, bytes] = {}
    if planning.options.timeline and simulation is not None:
        pictures = _timelines(simulation, plan, request.left_for_model)

    def show(console: Console) -> None:
        print_report(outcome, request.graph, console, task.profile, _beside(planning))
        if groups:
            classes = classes_of(task.profiled, task.operators)
            print_table(console, groups_table(request.graph, groups, classes))
        for sharding in task.shardings:
            print_table(console, sharding_table(plan, sharding))
            print_table(console, traffic_table(plan, sharding))
            _print_heaviest(task, sharding, plan, console)
        if task.shardings:
            _print_alone(task, plan, console)
        if task.calibration.runs:
            _judge(task, plan, console)

    def named(folder: Path) -> str:
        why = why_text(staged, folder / f"graph{suffix}")
        drawn = f"graph{suffix} ({why})" if why else f"graph{suffix}"
        return f"Written: {folder}/{', '.join(('plan.json', 'graph.txt', drawn, *pictures))}"

    return Section(show, {**files, **pictures}, named)


def _beside(planning: Planning) -> list[Table]:
    """What stands beside the answer: other numbers of machines, and what was chosen from."""
    plan, profile, options = planning.outcome.plan, planning.task.profile, planning.options
    tables = []
    if planning.scaled and profile is not None:
        tables.append(scaled_table(planning.scaled, plan, profile))
    if planning.considered and options.global_batch is not None:
        tables.append(considered_table(planning.considered, options.global_batch))
    return tables


def _on_devices(graph: Graph, plan: Plan) -> Graph:
    """Returns the graph with the times of nodes on the slowest device of their stage."""
    cluster, nodes, stages = plan.cluster, graph.nodes, plan.stages
    speeds = [min(cluster.device(rank).speed for rank in stage.ranks) for stage in stages]
    return graph.with_nodes(
        replace(
            nodes[name],
            forward_seconds=nodes[name].forward_seconds / speeds[stage],
            backward_seconds=nodes[name].backward_seconds / speeds[stage],
        )
        for name, stage in plan.stage_of.items()
        if speeds[stage] != 1
    )


def _timelines(simulation: Simulation, plan: Plan, memory: float | None) -> dict[str, bytes]:
    rank_of = simulation.rank_of(plan)
    events = {device: simulation.events[rank] for device, rank in rank_of.items()}
    curves = {device: simulation.memory[rank] for device, rank in rank_of.items()}
    stages = [stage.ranks for stage in plan.stages]
    title = "memory of each rank, simulated"
    return {
        "timeline.png": panels_png([Panel("simulated schedule", events)]),
        "timeline.json": chrome_text(events, {"memory": curves}).encode(),
        "memory.png": memory_png(curves, stages, title, memory),
    }


def _print_heaviest(task: Task, sharding: ModelSharding, plan: Plan, console: Console) -> None:
    """Prints what takes longest on a mesh, and what its axes are for."""
    assert task.profile is not None
    print_table(console, heaviest_table(plan, sharding, task.profile))
    stages = (stage for stage in plan.stages if stage.mesh == sharding.mesh)
    nodes = {node for stage in stages for node in stage.nodes}
    mesh = " x ".join(map(str, sharding.mesh))
    print_line(console, f"Mesh {mesh}: {axis_words(sharding, task.profile, nodes)}.")
    untimed = sharding.untimed_share(nodes)
    if untimed > _MUCH_UNTIMED:
        known = (
            "follows from their halves"
            if sharding.profile.local_seconds
            else "is taken to divide evenly"
        )
        print_line(
            console,
            f"{untimed:.0%} of a device's work there are parts of operators that were not timed:"
            f" what they take {known}. pd-profile --shards plan.json, with this plan, times them.",
        )


def _print_alone(task: Task, plan: Plan, console: Console) -> None:
    """Prints what the same stages take without meshes."""
    if plan.order is not None or not task.request.cost_model.prices_plans:
        return
    whole = on_single_devices(plan, task.of_devices)
    seconds = whole.seconds if whole.simulated is None else whole.simulated
    if whole.plan is None or seconds is None or whole.memory is None:
        print_line(console, f"The same stages without meshes: {whole.problem}")
    else:
        print_line(
            console,
            f"The same stages without meshes, a replica on each device: {show_seconds(seconds)} per"
            f" minibatch, {show_bytes(whole.memory)} on the fullest.",
        )


def _judge(task: Task, plan: Plan, console: Console) -> None:
    """Prints the runs, and compares the newest run's plan with this one."""
    known, request = task.calibration, task.of_devices
    run = known.runs[-1]
    print_runs(known.runs, known.works, task.profiled, request.overheads, console)
    now = known.priced(run.measured.plan, request)
    print_verdict(Verdict(run, now, plan), console)


def _export(framework: str, plan: Plan, task: Task) -> Iterator[Section]:
    assert task.profile is not None
    exported = export(framework, plan, task.request.graph, task.profile, task.shapes)
    stem = f"export-{framework}"
    files = exported.files(stem)
    names = ", ".join(name for name, content in files.items() if content is not None)
    yield Section(files=files, named=lambda folder: f"Exported: {folder / names}")
    yield _lines(*(f"  {note}" for note in exported.notes))


def _lines(*lines: str) -> Section:
    def show(console: Console) -> None:
        for line in lines:
            print_line(console, line)

    return Section(show)


def _sweep(planning: Planning, numbers: range) -> Section:
    frame = sweep_frame(list(sweep(planning.task.of_devices, numbers, planning.planned_for)))
    return Section(
        lambda console: print_table(console, sweep_table(frame)),
        {"sweep.csv": frame.to_csv(index=False).encode(), "sweep.png": sweep_png(frame)},
        lambda folder: f"Written: {folder}/sweep.csv, sweep.png",
    )


def _compare(planning: Planning) -> Section:
    request, plan = planning.task.of_devices, planning.outcome.plan
    count = planning.options.microbatches or 4 * request.cluster.devices
    others = {_workers(each): each for each in planning.other_workers}
    if planning.on_operators is not None:
        others |= {"stages of any operators": planning.on_operators}
    if others or planning.task.shardings:
        named = {"this plan": planning, **others}
        first = [
            as_contender(name, each.outcome.plan, each.simulation, request)
            for name, each in named.items()
        ]
        contenders = compare(request, count, None, first)
    else:
        contenders = compare(request, count, plan)
    table = comparison_frame(contenders).to_csv(index=False).encode()
    timelines = comparison_png(contenders)

    def show(console: Console) -> None:
        print_table(console, comparison_table(contenders, count))
        for contender in contenders:
            if contender.problem is not None:
                print_line(console, f"{contender.name}: {contender.problem}")

    return Section(
        show,
        {"compare.csv": table} | ({} if timelines is None else {"compare.png": timelines}),
        lambda folder: f"Written: {folder}/compare.csv, compare.png",
    )


def _workers(planning: Planning) -> str:
    """The workers of a plan, in words."""
    mesh = show_meshes(planning.outcome.plan)
    return f"workers of {mesh} devices" if mesh else "workers of one device"


def _choices(choices: Choices) -> Iterator[Section]:
    table = choices_frame(choices).to_csv(index=False).encode()
    yield Section(
        files={BATCH_SIZES_TABLE: table},
        named=lambda folder: f"Written: {folder}/{BATCH_SIZES_TABLE}",
    )
    yield _lines(choices.words)


def next_step(plan: Plan, profiled: str) -> Section:
    """The command that trains the plan, and a hint if the plan is no pipeline.

    `profiled`: the model as pd-profile was given it; a run config, if it is one that is there.
    """
    is_config = profiled.endswith((".yaml", ".yml")) and Path(profiled).is_file()
    config = profiled if is_config else "CONFIG.yaml"
    hint = "1 stage: this is data parallelism; add --straight for a pipeline without replicas"
    first, *others = plan.stages
    alone = not others and first.mesh is None and first.replicas > 1
    return replace(
        _lines(*([hint] if alone else [])),
        named=lambda folder: f"Next: pd-train {folder}/plan.json --config {config}",
    )

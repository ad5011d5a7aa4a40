"""`pd-optimize`: decides which part of a model runs where."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipedream.graph.command import Calculation, FiniteRange, UserError
from pipedream.graph.schedule_name import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipedream.graph.cluster import Cluster
    from pipedream.graph.footprint import Footprint
    from pipedream.graph.model import Graph
    from pipedream.graph.modules import Modules
    from pipedream.graph.plan import OptimizerName, Plan, Recompute
    from pipedream.graph.schedule_name import ScheduleName
    from pipedream.optimizer.latency import Latency
    from pipedream.optimizer.optimize import Request
    from pipedream.optimizer.simulator import Simulation

_MOST_DEVICES = 100_000
"""Far more than planning is made for: it takes time and memory for each."""


@click.command("pd-optimize", cls=Calculation)
@click.argument("graph", type=click.Path(path_type=Path))
@click.option(
    "--cluster",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Cluster file: levels, measured links, kinds of device. In place of the next three.",
)
@click.option(
    "--machines",
    metavar="N,N,...",
    help="Components of each level, innermost first: 4,2 is 2 machines of 4 devices.",
)
@click.option(
    "--bandwidth",
    metavar="B,B,...",
    help="Bytes per second of each level, innermost first: 10GB,1GB.",
)
@click.option(
    "--latency",
    metavar="T,T,...",
    help="What any message takes at each level, innermost first: 5us,50us.  [default: nothing]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for plan.json, graph.txt and graph.svg.  [default: GRAPH's folder/plan]",
)
@click.option(
    "--cost-model",
    type=click.Choice(["paper", "released", "measured"]),
    help="PipeDream's formulas as published, as its released optimizer has them, or latencies and"
    " links as measured.  [default: measured for a cluster file with measured links, else paper]",
)
@click.option("--straight", is_flag=True, help="No replication: one stage on each device.")
@click.option(
    "--memory", metavar="BYTES", help="What each device has, as 16GB.  [default: as it takes]"
)
@click.option("--fewer-machines", is_flag=True, help="Leave machines unused where that is better.")
@click.option(
    "--activation-compression",
    type=FiniteRange(min=0, min_open=True),
    metavar="R",
    help="By what factor the bytes between stages are compressed (released: 1 to count them).",
)
@click.option(
    "--schedule",
    type=click.Choice(SCHEDULES),
    help="[default: weight-stashing; flush for --objective latency]",
)
@click.option(
    "--export",
    "exports",
    type=click.Choice(["torch", "torchtitan", "deepspeed", "megatron"]),
    multiple=True,
    help="Write the plan for another framework, too; may be repeated.",
)
@click.option(
    "--objective",
    type=click.Choice(["throughput", "latency"]),
    default="throughput",
    show_default=True,
    help="The most minibatches per second, or the least time for a batch of --microbatches.",
)
@click.option(
    "--microbatches",
    type=click.IntRange(min=1),
    metavar="B",
    help="For latency: the minibatches of GRAPH that make one batch; with --schedule flush, gpipe"
    " or 2bw: one update.  [default: 4]  For --compare, the same of plans with a flush."
    "  [default: 4 for each device]",
)
@click.option(
    "--epsilon",
    type=FiniteRange(min=0),
    metavar="SECONDS",
    help="For latency: give up as much for each microbatch, to plan faster.  [default: 0]",
)
@click.option(
    "--layers",
    type=click.IntRange(min=1),
    metavar="L",
    help="For latency: make the graph into L layers first and cut between these alone.",
)
@click.option(
    "--timeline",
    is_flag=True,
    help="Draw the simulated schedule: timeline.png, timeline.json (Perfetto), memory.png.",
)
@click.option(
    "--compare",
    is_flag=True,
    help="Set the plan beside five others, each simulated: a table, compare.csv, compare.png.",
)
@click.option(
    "--sweep",
    metavar="FIRST..LAST",
    help="Plan for so many workers, too, as 1..64: a table, sweep.csv, sweep.png. They fill"
    " machines as --machines has them; the outermost level grows.",
)
@click.option(
    "--update-rate",
    metavar="BYTES",
    default="50GB",
    show_default=True,
    help="Parameters that the optimizer updates on a device in a second; for the simulation.",
)
@click.option(
    "--optimizer",
    type=click.Choice(["sgd", "momentum", "adam"]),
    default="adam",
    show_default=True,
    help="Whose state takes memory: none, one or two tensors for each parameter.",
)
@click.option(
    "--recompute",
    type=click.Choice(["never", "auto", "always"]),
    default="auto",
    show_default=True,
    help="Do a stage's forward pass again before its backward pass; auto: where --memory asks it.",
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    help="What the layers keep in memory, and their modules."
    "  [default: profile.json beside GRAPH, if it is there]",
)
def main(
    graph: Path,
    cluster: Path | None,
    machines: str | None,
    bandwidth: str | None,
    latency: str | None,
    output: Path | None,
    cost_model: str | None,
    straight: bool,
    memory: str | None,
    fewer_machines: bool,
    activation_compression: float | None,
    schedule: ScheduleName | None,
    exports: tuple[str, ...],
    objective: str,
    microbatches: int | None,
    epsilon: float | None,
    layers: int | None,
    timeline: bool,
    compare: bool,
    sweep: str | None,
    update_rate: str,
    optimizer: OptimizerName,
    recompute: Recompute,
    profile: Path | None,
) -> None:
    """Plans the model of GRAPH (a graph.txt of pd-profile) for a cluster.

    Writes plan.json for pd-train, graph.txt with a stage for each node, and its picture.
    """
    # Importing and planning make millions of objects that live on, and hardly a cycle: looking for
    # cycles as often as usual takes a tenth of the time. Nor is there work for threads of numpy's.
    gc.set_threshold(200_000)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from pipedream.runtime.policy import policy

    where = _cluster(cluster, machines, bandwidth, latency)
    limit = None if memory is None else _bytes("--memory", memory)
    aim = _latency(objective, schedule, microbatches, epsilon, layers)
    in_rounds = schedule is not None and policy(schedule, (1,)).same_everywhere
    if aim is None and microbatches is not None and not (in_rounds or compare):
        raise UserError(
            "--microbatches is of --objective latency, and of --schedule flush, gpipe and 2bw: add"
            " one of these, or leave it out"
        )
    rate = _bytes("--update-rate", update_rate)
    numbers = None if sweep is None else _numbers(sweep, where)
    folder = graph.parent / "plan" if output is None else output
    _check_folder(folder)
    made = profile or graph.with_name("profile.json")
    if exports and not made.exists():
        raise UserError(f"--export {exports[0]} needs {made}: pd-profile writes it with graph.txt")

    from pipedream.graph.text import read_graph
    from pipedream.optimizer.cost import COST_MODELS
    from pipedream.optimizer.hierarchy import Rules
    from pipedream.optimizer.optimize import Request, optimize
    from pipedream.optimizer.report import print_report
    from pipedream.optimizer.simulator import MOST_MOVES, QUICK_MOVES, simulate_plan

    model = read_graph(graph)
    modules = _modules(exports, made, model)
    request = Request(
        graph=model,
        cluster=where,
        model=COST_MODELS[cost_model or _cost_model(where)](activation_compression),
        schedule=schedule or ("weight-stashing" if aim is None else "flush"),
        memory=limit,
        rules=Rules(straight, fewer_machines),
        latency=aim,
        optimizer=optimizer,
        recompute=recompute,
        footprints=_footprints(profile, graph, model),
        microbatches=microbatches if in_rounds else None,
    )
    try:
        outcome = optimize(request)
    except MemoryError as error:
        raise UserError(
            f"{_named(cluster, machines)}: not enough memory here to plan for so many devices;"
            " give fewer"
        ) from error
    moves = MOST_MOVES if timeline else QUICK_MOVES
    simulation = simulate_plan(outcome.plan, model, update_rate=rate, most_moves=moves)
    if simulation is not None:
        outcome = replace(outcome, plan=simulation.noted_in(outcome.plan))
    print_report(outcome, model)
    _write(outcome.plan, model, folder, simulation if timeline else None, limit)
    if modules is not None:
        for framework in exports:
            _export(framework, outcome.plan, model, modules, folder)
    if numbers is not None:
        _sweep(request, numbers, rate, folder)
    if compare:
        _compare(request, microbatches or 4 * where.devices, rate, folder)


def _numbers(text: str, cluster: Cluster) -> range:
    from pipedream.optimizer.sweep import check_sweep, parse_range

    numbers = parse_range(text)
    check_sweep(cluster, numbers)
    return numbers


def _check_folder(folder: Path) -> None:
    """Raises UserError where it cannot be written, as far as that shows before planning."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"-o {folder}: cannot be written: {there} is a file; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"-o {folder}: cannot be written: {there} is not yours to write in")


def _modules(exports: tuple[str, ...], profile: Path, graph: Graph) -> Modules | None:
    """What every export needs; None where there is none."""
    if not exports:
        return None
    from pipedream.graph.modules import read_modules

    return read_modules(profile, graph)


def _sweep(request: Request, numbers: range, update_rate: float, folder: Path) -> None:
    """Prints the table of --sweep, and writes it as data and as a picture."""
    from pipedream.optimizer.report import make_console, print_table
    from pipedream.optimizer.sweep import draw_sweep, sweep, sweep_frame, sweep_table

    frame = sweep_frame(list(sweep(request, numbers, update_rate)))
    print_table(make_console(), sweep_table(frame))
    frame.to_csv(folder / "sweep.csv", index=False)
    draw_sweep(frame, folder / "sweep.png")
    click.echo(f"Written: {folder}/sweep.csv, sweep.png")


def _compare(request: Request, microbatches: int, update_rate: float, folder: Path) -> None:
    """Prints the table of --compare, and writes it as data and as timelines."""
    from pipedream.optimizer.compare import (
        compare,
        comparison_frame,
        comparison_table,
        draw_comparison,
    )
    from pipedream.optimizer.report import make_console, print_table

    contenders = compare(request, microbatches, update_rate)
    print_table(make_console(), comparison_table(contenders, microbatches))
    for contender in contenders:
        if contender.problem is not None:
            click.echo(f"{contender.name}: {contender.problem}")
    comparison_frame(contenders).to_csv(folder / "compare.csv", index=False)
    draw_comparison(contenders, folder / "compare.png")
    click.echo(f"Written: {folder}/compare.csv, compare.png")


def _export(framework: str, plan: Plan, model: Graph, modules: Modules, folder: Path) -> None:
    from pipedream.optimizer.export import export, write_export

    made = export(framework, plan, model, modules)
    path = folder / f"export-{framework}.json"
    try:
        write_export(made, path)
    except OSError as error:
        raise UserError(f"-o {folder}: cannot be written: {error.strerror}") from error
    click.echo(f"Exported: {path}")
    for note in made.notes:
        click.echo(f"  {note}")


def _latency(
    objective: str,
    schedule: str | None,
    microbatches: int | None,
    epsilon: float | None,
    layers: int | None,
) -> Latency | None:
    given = {"--epsilon": epsilon, "--layers": layers}
    if objective == "throughput":
        for option, value in given.items():
            if value is not None:
                raise UserError(f"{option} is of --objective latency: add that, or leave it out")
        return None
    if microbatches is None:
        raise UserError("--objective latency: add --microbatches B, how many make one batch")
    if schedule not in (None, "flush", "gpipe"):
        raise UserError(
            "--objective latency is of the flush schedule, or gpipe: leave out"
            f" --schedule {schedule}"
        )
    from pipedream.optimizer.latency import Latency

    return Latency(microbatches, epsilon or 0.0, layers)


def _footprints(profile: Path | None, path: Path, graph: Graph) -> Mapping[str, Footprint] | None:
    """Of the profile that was asked for; else of the one beside the graph, if it is of this one."""
    from pipedream.graph.footprint import read_footprints

    if profile is not None:
        found = read_footprints(profile, graph)
        if found is None:
            raise UserError(f"--profile {profile}: has no memory in it: run pd-profile again")
        return found
    try:
        return read_footprints(path.parent / "profile.json", graph)
    except UserError:
        return None


def _write(
    plan: Plan, model: Graph, folder: Path, simulation: Simulation | None, memory: float | None
) -> None:
    """Writes the plan and its pictures: of the simulation, too, where there is one."""
    from pipedream.graph.draw import draw, why_text
    from pipedream.graph.plan import write_plan
    from pipedream.graph.text import format_graph

    staged = model.with_stages(plan.stage_of)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_plan(plan, folder / "plan.json")
        (folder / "graph.txt").write_text(format_graph(staged), encoding="utf-8")
        picture = draw(staged, folder / "graph")
        drawn = "" if simulation is None else _draw(simulation, plan, folder, memory)
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
    write_chrome(simulation.events, folder / "timeline.json", simulation.memory)
    stages = [stage.ranks for stage in plan.stages]
    title = "memory of each rank, simulated"
    draw_memory(simulation.memory, stages, folder / "memory.png", title, memory)
    return ", timeline.png, timeline.json, memory.png"


def _cluster(
    file: Path | None, machines: str | None, bandwidth: str | None, latency: str | None
) -> Cluster:
    """From the cluster file, or from the short form."""
    given = {"--machines": machines, "--bandwidth": bandwidth, "--latency": latency}
    if file is not None:
        from pipedream.graph.cluster_file import read_cluster

        twice = [option for option, value in given.items() if value is not None]
        if twice:
            raise UserError(
                f"--cluster {file} and {twice[0]} both say what the cluster is: give one of them"
            )
        cluster = read_cluster(file)
    elif machines is None or bandwidth is None:
        missing = "--machines" if machines is None else "--bandwidth"
        raise UserError(
            f"Missing option '{missing}': give --machines and --bandwidth, or --cluster FILE"
        )
    else:
        cluster = _short_cluster(machines, bandwidth, latency)
    if cluster.devices > _MOST_DEVICES:
        raise UserError(f"{_named(file, machines)}: give at most {_MOST_DEVICES:,} devices in all")
    return cluster


def _named(file: Path | None, machines: str | None) -> str:
    return f"--machines {machines}" if file is None else f"--cluster {file}"


def _short_cluster(machines: str, bandwidth: str, latency: str | None) -> Cluster:
    from pydantic import ValidationError

    from pipedream.graph.cluster import Cluster

    try:
        counts = tuple(int(count) for count in machines.split(","))
    except ValueError:
        raise UserError(f"--machines {machines}: give whole numbers, as 4,2") from None
    speeds = tuple(_bytes("--bandwidth", speed) for speed in bandwidth.split(","))
    delays = tuple(_seconds("--latency", delay) for delay in latency.split(",")) if latency else ()
    try:
        return Cluster(machines=counts, bandwidth=speeds, latency=delays)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        also = "" if latency is None else f" --latency {latency}"
        raise UserError(f"--machines {machines} --bandwidth {bandwidth}{also}: {reason}") from None


def _cost_model(cluster: Cluster) -> str:
    return "measured" if cluster.measured else "paper"


def _bytes(option: str, text: str) -> float:
    from pipedream.graph.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from None


def _seconds(option: str, text: str) -> float:
    from pipedream.graph.units import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from None

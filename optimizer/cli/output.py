"""Writes the files of `pd-optimize`, and prints what goes with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import click

from pipedream.graph import timeline
from pipedream.graph.command import write_whole, writing
from pipedream.graph.draw import draw, why_text
from pipedream.graph.model import Graph, format_graph
from pipedream.graph.plan import Plan, write_plan
from pipedream.graph.profile import BATCH_SIZES_TABLE
from pipedream.graph.tables import make_console, print_table
from pipedream.optimizer.calibrate.price_plan import price_plan
from pipedream.optimizer.calibrate.verdict import Verdict, print_runs, print_verdict
from pipedream.optimizer.cli.task import Task
from pipedream.optimizer.compare.batch_sizes import Choices, choices_frame
from pipedream.optimizer.compare.comparison import (
    compare,
    comparison_frame,
    comparison_table,
    draw_comparison,
)
from pipedream.optimizer.compare.sweep import draw_sweep, sweep, sweep_frame, sweep_table
from pipedream.optimizer.export.frameworks import export, write_export
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.sharding.model_sharding import ModelSharding
from pipedream.optimizer.sharding.table import sharding_table, traffic_table
from pipedream.optimizer.simulate.simulation import Simulation

_NO_NOTES: Mapping[str, str] = MappingProxyType({})


def write_plan_files(
    plan: Plan,
    request: Request,
    folder: Path,
    simulation: Simulation | None,
    whole: Graph,
    modules: Mapping[str, str] | None = None,
    notes: Mapping[str, str] = _NO_NOTES,
) -> str:
    """Writes plan.json, graph.txt and pictures, of the simulation too if there is one; returns a
    line that names them. `whole`: the graph that graph.txt is to have; `modules`: the path of the
    module of each node; `notes`: what is to be written at nodes in the picture.

    Raises UserError if the folder cannot be written.
    """
    staged = _on_devices(request.graph.with_stages(plan.stage_of), plan)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_plan(plan, folder / "plan.json")
        write_whole(folder / "graph.txt", format_graph(whole.with_stages(plan.stage_of)))
        picture = draw(staged, folder / "graph", modules=modules, notes=notes)
        drawn = "" if simulation is None else _draw(simulation, plan, folder, request.memory)
    why = why_text(staged, picture)
    files = f"{folder}/plan.json, graph.txt, {picture.name}"
    return f"Written: {files}" + (f" ({why})" if why else "") + drawn


def _on_devices(graph: Graph, plan: Plan) -> Graph:
    """The graph with the times that nodes take on the slowest device of their stage."""
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


def print_sharding(plan: Plan, sharding: ModelSharding) -> None:
    """Prints how the parameters of each stage are placed, and what its devices exchange."""
    console = make_console()
    print_table(console, sharding_table(plan, sharding))
    print_table(console, traffic_table(plan, sharding))


def _draw(simulation: Simulation, plan: Plan, folder: Path, memory: float | None) -> str:
    """Writes the pictures of --timeline; returns their names for the user."""
    timeline.draw(simulation.events, folder / "timeline.png", "simulated schedule")
    timeline.write_chrome(
        simulation.events, folder / "timeline.json", {"memory": simulation.memory}
    )
    stages = [stage.ranks for stage in plan.stages]
    title = "memory of each rank, simulated"
    timeline.draw_memory(simulation.memory, stages, folder / "memory.png", title, memory)
    return ", timeline.png, timeline.json, memory.png"


def export_plan(framework: str, plan: Plan, task: Task, folder: Path) -> None:
    """Writes export-FRAMEWORK.json, and a CSV where there is one, and prints the notes. Raises
    UserError if not possible.
    """
    assert task.profile is not None
    exported = export(framework, plan, task.request.graph, task.profile)
    path = folder / f"export-{framework}.json"
    with writing(folder):
        write_export(exported, path)
    click.echo(f"Exported: {path}" + ("" if exported.csv is None else f", {path.stem}.csv"))
    for note in exported.notes:
        click.echo(f"  {note}")


def say_next(plan: Plan, folder: Path, profiled: str = "") -> None:
    """Prints the command that trains the plan, and a hint if the plan is no pipeline.

    `profiled`: the model as pd-profile was given it; a run config, if it is one that is there.
    """
    if len(plan.stages) == 1 and plan.stages[0].replicas > 1:
        click.echo(
            "1 stage: this is data parallelism; add --straight for a pipeline without replicas"
        )
    is_config = profiled.endswith((".yaml", ".yml")) and Path(profiled).is_file()
    config = profiled if is_config else "CONFIG.yaml"
    click.echo(f"Next: pd-train {folder}/plan.json --config {config}")


def sweep_workers(request: Request, numbers: range, folder: Path) -> None:
    """Prints the table of --sweep; writes it as CSV and as a picture."""
    frame = sweep_frame(list(sweep(request, numbers)))
    print_table(make_console(), sweep_table(frame))
    write_whole(folder / "sweep.csv", frame.to_csv(index=False))
    draw_sweep(frame, folder / "sweep.png")
    click.echo(f"Written: {folder}/sweep.csv, sweep.png")


def compare_plans(request: Request, microbatches: int, chosen: Plan, folder: Path) -> None:
    """Prints the table of --compare; writes it as CSV and as timelines."""
    contenders = compare(request, microbatches, chosen)
    print_table(make_console(), comparison_table(contenders, microbatches))
    for contender in contenders:
        if contender.problem is not None:
            click.echo(f"{contender.name}: {contender.problem}")
    write_whole(folder / "compare.csv", comparison_frame(contenders).to_csv(index=False))
    draw_comparison(contenders, folder / "compare.png")
    click.echo(f"Written: {folder}/compare.csv, compare.png")


def write_choices(choices: Choices, folder: Path) -> None:
    """Writes the table of batch sizes as CSV, and prints which size was chosen."""
    with writing(folder):
        write_whole(folder / BATCH_SIZES_TABLE, choices_frame(choices).to_csv(index=False))
    click.echo(f"Written: {folder}/{BATCH_SIZES_TABLE}")
    click.echo(choices.words)


def judge(task: Task, plan: Plan) -> None:
    """Prints the measurements of the runs, and compares the newest run's plan with this one."""
    run, request = task.runs[-1], task.request
    print_runs(task.runs, task.profiled, request.overheads)
    now = price_plan(run.measured.plan, request)
    print_verdict(Verdict(run, now, plan))

"""`pd-optimize`: decides which part of a model runs where."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from pipedream.graph.command import PATH, Command, UserError
from pipedream.optimizer.cli.arguments import EXAMPLES, GROUPS
from pipedream.optimizer.cli.cluster_options import named
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.cli.task import Task, check_global_batch, make_task

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pipedream.optimizer.compare.batch_sizes import Choices
    from pipedream.optimizer.search.outcome import Outcome
    from pipedream.optimizer.simulate.simulation import Simulation


@click.command("pd-optimize", cls=Command, groups=GROUPS, examples=EXAMPLES)
@click.argument("graph", type=PATH)
def main(**values: Any) -> None:
    """Plan the model of GRAPH, a graph.txt of pd-profile, for a cluster.

    Writes plan.json for pd-train, graph.txt with the stage of each node, and a picture of it.

    GRAPH may be the folder that has it, or one made by pd-profile --batch-sizes; then each batch
    size is planned, and the fastest is chosen.
    """
    # Planning makes millions of long-lived objects and hardly any cycles: the collector's default
    # thresholds cost a tenth of the time. Threads of numpy's BLAS do not help either.
    gc.set_threshold(200_000)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    options = Options(**values)
    check_global_batch(options)
    choices: Choices | None = None
    if (options.graph / "graph.txt").exists():
        options = replace(options, graph=options.graph / "graph.txt")
    if options.graph.is_dir():
        choices, options, task, outcome, simulation = _choose(options)
    else:
        task = make_task(options)
        task, outcome, simulation = _plan(task, options)
    outcome = replace(outcome, plan=task.expanded(outcome.plan))

    from pipedream.optimizer.cli import output
    from pipedream.optimizer.report.plan_report import print_report

    # First of all: `pd-optimize ... | head` ends with the first line that is too many.
    modules = None if task.profile is None else task.profile.modules
    folder = options.folder
    whole = task.request.graph if task.sharding is None else task.profiled
    written = output.write_plan_files(
        outcome.plan, task.request, folder, simulation, whole, modules, task.placement_notes
    )
    print_report(outcome, task.request.graph, profile=task.profile)
    if task.sharding is not None:
        output.print_sharding(outcome.plan, task.sharding)
    if task.runs:
        output.judge(task, outcome.plan)
    click.echo(written)
    for framework in options.exports:
        output.export_plan(framework, outcome.plan, task, options.folder)
    if task.numbers is not None:
        output.sweep_workers(task.request, task.numbers, options.folder)
    if options.compare:
        microbatches = options.microbatches or 4 * task.request.cluster.devices
        output.compare_plans(task.request, microbatches, outcome.plan, options.folder)
    if choices is not None:
        output.write_choices(choices, options.folder)
    profiled = "" if task.profile is None else task.profile.model
    output.say_next(outcome.plan, options.folder, profiled)


def _plan(task: Task, options: Options) -> tuple[Task, Outcome, Simulation | None]:
    """The best plan, with its simulated figures, and the simulation if --timeline wants it; and the
    task with the schedule that was chosen.

    Raises UserError if there is no plan.
    """
    from pipedream.optimizer.choose.tied import plan_shared
    from pipedream.optimizer.cli.like import recorded_options
    from pipedream.optimizer.simulate.simulator import MOST_MOVES, QUICK_MOVES, simulate_plan

    try:
        request, outcome, notes = plan_shared(task.request, task.any_schedule)
    except MemoryError as error:
        raise UserError(
            f"{named(options)}: not enough memory here to plan for so many devices; give fewer"
        ) from error
    most_moves = MOST_MOVES if options.timeline else QUICK_MOVES
    simulation = simulate_plan(
        outcome.plan, request.graph, request.update_rate, request.overheads, most_moves
    )
    plan = outcome.plan if simulation is None else simulation.noted_in(outcome.plan)
    recorded = recorded_options(options, request.footprints is not None)
    plan = plan.model_copy(update={"asked": recorded, "batch_size": task.batch_size})
    task, outcome = (
        replace(task, request=request),
        replace(outcome, plan=plan, notes=(*notes, *outcome.notes)),
    )
    return task, outcome, simulation if options.timeline else None


def _choose(options: Options) -> tuple[Choices, Options, Task, Outcome, Simulation | None]:
    """Plans for each batch size, prints how they compare, and returns the best one's results."""
    from pipedream.optimizer.cli.batch_sizes import options_by_size
    from pipedream.optimizer.compare.batch_sizes import Choice, Choices, print_choices

    by_size = options_by_size(options, _typed)
    tasks = _tasks(by_size, options.graph)
    planned: dict[int, tuple[Task, Outcome, Simulation | None]] = {}

    def choice(size: int) -> Choice:
        if size not in tasks:
            return Choice(None, None, size, f"does not divide {options.global_batch}")
        try:
            planned[size] = _plan(tasks[size][1], tasks[size][0])
        except UserError as error:
            return Choice(None, error.format_message(), size)
        return Choice(planned[size][1].plan, None, size)

    choices = Choices(tuple(map(choice, by_size)), options.global_batch)
    print_choices(choices)
    best = choices.best.batch_size
    return choices, tasks[best][0], *planned[best]


def _tasks(by_size: Mapping[int, Options | None], folder: Path) -> dict[int, tuple[Options, Task]]:
    """The task of each batch size. Raises UserError if they are not of one model."""
    from pipedream.optimizer.compare.batch_sizes import check_alike

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


def _typed(name: str) -> bool:
    """Whether the option of this name was on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


if __name__ == "__main__":
    main()

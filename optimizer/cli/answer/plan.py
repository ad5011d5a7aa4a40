"""Planning as a function of options: what pd-optimize and `pipedream.optimize` both call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipedream.graph.errors import UserError
from pipedream.optimizer.calibrate.verdict import Verdict
from pipedream.optimizer.cli.answer.by_size import options_by_size, tasks_by_size, with_sequence
from pipedream.optimizer.cli.answer.update import is_open, plan_update
from pipedream.optimizer.cli.asked.operators import with_fitting_mesh
from pipedream.optimizer.cli.asked.updates import with_global_batch
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.cli.planning import Planning, plan_task
from pipedream.optimizer.cli.task import make_task
from pipedream.optimizer.compare.batch_sizes import Choice, Choices
from pipedream.optimizer.compare.considered import Considered


def plan(options: Options) -> Planning:
    """Plans what the options ask for. Raises UserError for wrong ones, and if there is no plan."""
    options = with_global_batch(with_sequence(options))
    if isinstance(options.graph, Path) and options.graph.is_dir():
        return _plan_by_size(options, options.graph)
    fitting = with_fitting_mesh(options)
    if is_open(options):
        task = make_task(fitting)
        return plan_update(fitting, {task.batch_size or 1: (fitting, task)})
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


def _plan_by_size(options: Options, folder: Path) -> Planning:
    """Plans for each batch size in the folder; returns the best one's plan. Raises UserError."""
    by_size = options_by_size(options)
    tasks = tasks_by_size(by_size, folder)
    if is_open(options):
        left_out = [size for size in by_size if size not in tasks]
        planning = plan_update(options, tasks, left_out)
        return replace(planning, choices=_choices_of(planning, options.global_batch))
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


def _choices_of(planning: Planning, examples: int | None) -> Choices:
    """What was considered for each batch size: what was chosen, else in order 1F1B."""
    best: dict[int, Considered] = {}
    for row in planning.considered:
        known = best.get(row.batch_size)
        if known is None or row.chosen:
            best[row.batch_size] = row
    rows = [best[size] for size in sorted(best)]
    choices = (Choice(row.plan, None, row.batch_size, row.problem) for row in rows)
    return Choices(tuple(choices), examples)

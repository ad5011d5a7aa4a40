"""An update of --global-batch examples: batch size, recomputation, order and plan are chosen
together, roughly at first, the choice then fully.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

from pipedream.graph.errors import UserError
from pipedream.graph.plan import DraftPlan
from pipedream.optimizer.choose.ordered import best_in_shape
from pipedream.optimizer.choose.ordered_trials import OrderedTrial
from pipedream.optimizer.choose.trial import Trial
from pipedream.optimizer.cli.answer.rough import ORDERS, rough_choice, rough_orders
from pipedream.optimizer.cli.answer.scaling import scaled_from
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.cli.planning import Planning, plan_task, planning_of, seconds_of
from pipedream.optimizer.cli.task import Task, make_task
from pipedream.optimizer.compare.considered import Considered

_WORTH_AN_ORDER = 0.02
"""The part of the time that workers wait, from which on other orders are tried."""

_FASTER = 0.99
"""Of the seconds of the plan in order 1F1B: an order that is no faster is not worth it."""


def is_open(options: Options) -> bool:
    """Whether the planner chooses how an update of --global-batch is made: not where the user says
    the stages or the order, another objective or schedule, or a run to correct times by.
    """
    given = (options.order, options.stages_per_rank, options.split, options.replicas)
    if any(given) or options.calibrate or options.sweep:
        return False
    default = options.cost_model in (None, "network") and options.objective == "throughput"
    return options.global_batch is not None and options.schedule == "flush" and default


def plan_update(
    options: Options, tasks: Mapping[int, tuple[Options, Task]], left_out: Sequence[int] = ()
) -> Planning:
    """The fastest plan found for an update; `tasks` are by batch size, `left_out` those that do not
    divide it. Raises UserError if there is none.
    """
    assert options.global_batch is not None
    sizes = _Sizes(options.global_batch, tasks)
    size, best = sizes.settled()
    rows = [*sizes.rows(size), *(_undivided(each, options.global_batch) for each in left_out)]
    ordered, orders, note = _in_other_orders(best, options.global_batch)
    if ordered is not None:
        rows = [replace(row, chosen=False) for row in rows]
        best = ordered
    else:
        best = replace(best, outcome=replace(best.outcome, notes=(*best.outcome.notes, note)))
    return replace(best, considered=(*rows, *orders), scaled=scaled_from(best))


class _Sizes:
    """Plans for each batch size: rough ones of all, the others of those that look best."""

    def __init__(self, examples: int, tasks: Mapping[int, tuple[Options, Task]]) -> None:
        self.examples, self.tasks = examples, tasks
        self.rough: dict[int, Trial] = {}
        self.planned: dict[int, Planning] = {}
        self.problems: dict[int, str] = {}
        for size, (_, task) in tasks.items():
            with suppress(UserError):  # which planning it fully raises again
                trial = rough_choice(task.request)
                if trial is not None:
                    self.rough[size] = trial

    def settled(self) -> tuple[int, Planning]:
        """The best first: a size is planned fully as long as it looks faster than all that have
        been. Where no rough plan fits, all are. Raises UserError if no size has a plan.
        """
        while left := [size for size in self.tasks if size not in self.problems]:
            size = min(left, key=self._seconds)
            if size in self.planned:
                return size, self.planned[size]
            options, task = self.tasks[size]
            try:
                self.planned[size] = plan_task(task, options)
            except UserError as error:
                self.problems[size] = error.format_message()
        raise UserError(_no_plan(self.problems))

    def _seconds(self, size: int) -> float:
        """Of an update, as far as is known."""
        if size in self.planned:
            return seconds_of(self.planned[size]) * self.examples / size
        if size in self.rough:
            return self.rough[size].seconds * self.examples / size
        return inf if self.rough else 0.0

    def rows(self, chosen: int) -> Iterator[Considered]:
        for size in self.tasks:
            if size in self.planned:
                plan: DraftPlan = self.planned[size].outcome.plan
                yield Considered(size, plan, self._seconds(size), False, size == chosen)
            elif size in self.rough and size not in self.problems:
                yield Considered(size, self.rough[size].plan, self._seconds(size))
            else:
                problem = self.problems.get(size, "does not fit with workers of one device")
                yield Considered(size, problem=problem)


def _no_plan(problems: Mapping[int, str]) -> str:
    size, problem = next(iter(problems.items()))
    return (
        problem if len(problems) == 1 else f"no batch size has a plan; batch size {size}: {problem}"
    )


def _undivided(size: int, examples: int) -> Considered:
    return Considered(size, problem=f"does not divide {examples}")


def _in_other_orders(
    plain: Planning, examples: int
) -> tuple[Planning | None, list[Considered], str]:
    """The plan in another order of passes if that is faster, the best rough plan in each, and why
    none were tried.
    """
    simulated, request = plain.outcome.plan.predicted.simulated, plain.task.of_devices
    if simulated is None or simulated.bubble < _WORTH_AN_ORDER or request.cluster.devices == 1:
        waiting = 0.0 if simulated is None else simulated.bubble
        why = f"in order 1f1b workers wait {waiting:.1%} of the time, all that these could save"
        return None, [], f"Other orders of passes were not tried: {why}."
    if request.has_many_devices:
        why = f"that takes long for {request.cluster.devices} devices; --order best does it"
        return None, [], f"Other orders of passes were not tried: {why}."
    options, size = plain.options, plain.task.batch_size or 1
    found: dict[str, OrderedTrial] = {}
    for order in ORDERS:
        with suppress(UserError):
            task = make_task(replace(options, order=order, mesh=None, shard=()))
            stages = len(plain.outcome.plan.stages)
            trials = list(rough_orders(task.request, max(2, stages)))
            if trials:
                found[order] = min(trials, key=lambda trial: trial.seconds)
    rows = [
        Considered(size, trial.plan, trial.seconds * examples / size, rank_bytes=trial.rank_bytes)
        for trial in found.values()
    ]
    best = min(found.values(), key=lambda trial: trial.seconds, default=None)
    if best is None or best.seconds >= seconds_of(plain) * _FASTER:
        return None, rows, "Other orders of passes were tried roughly, and none was faster."
    ordered = _planned_in_order(plain, best)
    if seconds_of(ordered) >= seconds_of(plain) * _FASTER:
        return None, rows, "Other orders of passes were tried, and none was faster."
    seconds = seconds_of(ordered) * examples / size
    held = ordered.outcome.rank_bytes
    chosen = Considered(size, ordered.outcome.plan, seconds, False, True, rank_bytes=held)
    return ordered, [chosen, *(row for row in rows if row.order != best.order)], ""


def _planned_in_order(plain: Planning, best: OrderedTrial) -> Planning:
    """The plan in the order and the shape of a trial, its cuts moved as long as that helps."""
    options = replace(
        plain.options, order=best.order, stages_per_rank=best.shape.stages_each, mesh=None, shard=()
    )
    task = make_task(options)
    predicted = plain.outcome.plan.predicted
    outcome = best_in_shape(task.request, best.shape).predicting(
        data_parallel_seconds=predicted.data_parallel_seconds
    )
    return planning_of(replace(task, batch_size=plain.task.batch_size), options, outcome)

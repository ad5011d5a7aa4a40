"""The verdict of `--calibrate`: profile against runs, and whether another plan is better now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipedream.graph.measured_run import MeasuredRun
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan
from pipedream.graph.profile import Quartiles, TrainingOverheads
from pipedream.graph.shown.tables import print_table
from pipedream.graph.units import show_seconds
from pipedream.optimizer.calibrate.price_plan import Price
from pipedream.optimizer.calibrate.runs import CalibrationRun, DividedWork
from pipedream.optimizer.report.tables import make_grid, make_table, show_count

ALIKE = 0.01
"""Plans whose times differ by less count as equal: so much do two runs of one plan differ."""


@dataclass(frozen=True)
class Verdict:
    """The price `now` of the newest run's plan with corrected times, and the best plan for them."""

    run: CalibrationRun
    now: Price
    best: Plan

    @property
    def stays(self) -> bool:
        """Whether the best plan is the run's plan."""
        return _split(self.best) == _split(self.run.measured.plan)

    @property
    def gain(self) -> float:
        """Relative speedup of the best plan by what it was chosen by; negative if it is slower."""
        goal = Price.recorded_in(self.best).goal
        return self.now.goal / goal - 1 if goal else 0.0

    @property
    def words(self) -> str:
        """The verdict in one line."""
        named = f"plan of {self.run.folder}"
        if self.stays:
            return f"The {named} stays the best."
        best = Price.recorded_in(self.best)
        unit = "minibatch" if self.now.latency is None else "batch"
        times = f"{_change(self.now.goal, best.goal)} per {unit}"
        if abs(self.gain) < ALIKE:
            return (
                f"The best plan now is as fast as the {named}: {times}. There is no need to change."
            )
        if self.gain < 0:
            return f"The {named} is faster than the best that was asked for now: {times}."
        if best.chosen_by == "closed form" and self.now.simulated and best.simulated:
            times += f" (simulated: {_change(self.now.simulated, best.simulated)})"
        return f"The best plan now is {self.gain:.1%} faster than the {named}: {times}."


def _change(before: float, after: float) -> str:
    return f"{show_seconds(after)} in place of {show_seconds(before)}"


def _split(plan: Plan) -> list[tuple[object, ...]]:
    return [
        (frozenset(s.nodes), s.replicas, s.recompute, s.offload, s.zero, s.mesh)
        for s in plan.stages
    ]


def print_runs(
    runs: Sequence[CalibrationRun],
    works: Sequence[DividedWork | None],
    profiled: Graph,
    overheads: TrainingOverheads | None,
    console: Console,
) -> None:
    """Prints a table per run: the passes of each stage as profiled and as measured."""
    for run, work in zip(runs, works, strict=True):
        print_table(console, _stages(run, work, profiled, overheads or TrainingOverheads({})))


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Prints the times of the run's plan (predicted, measured, predicted now) and the verdict."""
    console.print(f"\nThe plan of {verdict.run.folder}", markup=False)
    console.print(_times(verdict))
    console.print(verdict.words, markup=False, soft_wrap=not console.is_terminal)


def _stages(
    run: CalibrationRun, work: DividedWork | None, profiled: Graph, overheads: TrainingOverheads
) -> Table:
    measured = run.measured
    folder = escape(str(run.folder))
    threads = show_count(measured.threads, "thread")
    table = make_table(
        f"{folder}: minibatches of {measured.batch_size}, {threads} on each rank",
        "Medians of one minibatch on one worker. The last stage has the loss in both.",
        *("stage", "replicas", "minibatches", "forward,\nprofiled", "measured", "times"),
        *("backward,\nprofiled", "measured", "times"),
    )
    for stage in measured.plan.stages:
        nodes = [profiled.nodes[n] for n in stage.nodes if not profiled.nodes[n].is_input]
        overhead = overheads.of_stage(stage.stage, len(measured.plan.stages))
        forward, backward = run.passes(stage.stage, profiled=profiled)
        passes = (
            (sum(n.forward_seconds for n in nodes), sum(n.backward_seconds for n in nodes))
            if work is None
            else (work.seconds(nodes, False), work.seconds(nodes, True))
        )
        table.add_row(
            str(stage.stage),
            str(stage.replicas),
            str(sum(rank.minibatches for rank in measured.of_stage(stage.stage))),
            *_pass(overhead[0] + passes[0], forward),
            *_pass(overhead[1] + passes[1], backward),
        )
    return table


def _pass(profiled: float, replicas: Sequence[Quartiles]) -> tuple[str, str, str]:
    """Returns profiled seconds, measured seconds (mean of the replicas), and their ratio."""
    seconds = fmean(spread.median for spread in replicas)
    times = f"{seconds / profiled:.2f}" if profiled else "-"
    return show_seconds(profiled), show_seconds(seconds), times


def _times(verdict: Verdict) -> Table:
    measured = verdict.run.measured
    before = Price.recorded_in(measured.plan)
    table = make_grid()
    for name, price in (("predicted before", before), ("predicted now", verdict.now)):
        figures = {
            "expected in a run": price.expected,
            "simulated": price.simulated,
            "in closed form": price.per_minibatch,
        }
        known = ((what, show_seconds(s)) for what, s in figures.items() if s is not None)
        (first, shown), *others = known
        table.add_row(name, shown, ", ".join([first, *map(" ".join, others)]))
    table.add_row("measured", show_seconds(measured.seconds_per_minibatch), _trained(measured))
    table.add_row("  of that, compute", *_busy(measured))
    return table


def _trained(measured: MeasuredRun) -> str:
    """Returns what the measured time covers, with a warning if the schedule is not the plan's."""
    planned, remark = measured.plan.schedule, "while the minibatches above were done"
    if measured.schedule == planned:
        return remark
    return f"{remark}, with {measured.schedule}; the plan is for {planned}"


def _busy(measured: MeasuredRun) -> tuple[str, str]:
    """Returns the time in which the slowest stage computes, and words for the rest."""
    stage, seconds = measured.slowest
    rest = measured.seconds_per_minibatch - seconds
    busy = f"passes and updates of stage {stage}, the slowest"
    if rest > 0:
        share = rest / measured.seconds_per_minibatch
        busy += f"; {show_seconds(rest)} ({share:.1%}) is messages and waiting"
    return show_seconds(seconds), busy

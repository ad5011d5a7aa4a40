"""What the plan expected of a minibatch beside what a run took, and where the difference lies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pipedream.graph.measured_run import MeasuredRun
from pipedream.graph.plan import Plan, workers_by_rank
from pipedream.graph.units import show_seconds


@dataclass(frozen=True)
class Seconds:
    """Seconds per minibatch of the pipeline, expected and measured."""

    expected: float
    measured: float

    @property
    def change(self) -> float:
        return self.measured - self.expected

    @property
    def shown_change(self) -> str:
        return f"{'+' if self.change >= 0 else '-'}{show_seconds(abs(self.change))}"

    def __str__(self) -> str:
        measured, expected = show_seconds(self.measured), show_seconds(self.expected)
        return f"{measured}, expected {expected} ({self.shown_change})"


@dataclass(frozen=True)
class Comparison:
    """A minibatch as a whole, and on the workers of `stage`, the busiest: what they computed, and
    what they spent on messages, sums and waiting. `as_expected`: whether the whole is among what
    nine of ten runs take.
    """

    whole: Seconds
    stage: int
    compute: Seconds
    rest: Seconds
    as_expected: bool


def compare(run: MeasuredRun) -> Comparison | None:
    """Returns the two beside each other; None if the plan expects nothing of such a run."""
    predicted = run.plan.predicted
    expected = predicted.expected_seconds_per_minibatch
    if expected is None or predicted.simulated is None:
        return None
    if run.schedule != run.plan.schedule or run.plan.batch_size not in (None, run.batch_size):
        return None
    stage, busy = run.slowest
    whole = Seconds(expected, run.seconds_per_minibatch)
    compute = Seconds(min(expected, _busy_as_planned(run.plan)[stage]), busy)
    rest = Seconds(whole.expected - compute.expected, max(0.0, whole.measured - compute.measured))
    return Comparison(whole, stage, compute, rest, predicted.expects(run.seconds_per_minibatch))


def _busy_as_planned(plan: Plan) -> list[float]:
    """Seconds per minibatch that a worker of each stage is busy in the simulation; with passes
    alone if there was none.

    Updates and calls, which it counts for all stages together, are shared out as the passes are.
    """
    passes = [stage.compute_seconds / stage.replicas for stage in plan.stages]
    simulated = plan.predicted.simulated
    every = sum(stage.compute_seconds for stage in plan.stages)
    if simulated is None or not every:
        return passes
    workers = len({team for stage in plan.stages for team in stage.teams})
    busy = (1 - simulated.bubble) * workers * simulated.seconds_per_minibatch
    return [seconds * busy / every for seconds in passes]


def busy_shares(plan: Plan) -> dict[int, float]:
    """Returns the share of its time that each rank would be busy if a minibatch took what is
    expected of it in a run.
    """
    busy, period = _busy_as_planned(plan), plan.predicted.seconds_in_a_run
    return {
        rank: sum(busy[stage] for stage, _ in workers) / period if period else 0.0
        for rank, workers in workers_by_rank(plan.rank_assignment).items()
    }


def figures(comparison: Comparison) -> list[str]:
    """Returns lines for the end of a run."""
    if comparison.as_expected:
        return []
    return [
        f"  stage {comparison.stage} computed  {comparison.compute}",
        f"  messages, waiting {comparison.rest}",
    ]


def advice(comparison: Comparison, run: MeasuredRun, folder: Path) -> list[str]:
    """Returns lines on what would bring plan and run together; none where it went as expected."""
    if comparison.as_expected:
        return []
    if abs(comparison.compute.change) >= abs(comparison.rest.change):
        if any(stage.mesh is not None for stage in run.plan.stages):
            return [
                "Passes took other times than planned, with the messages of a mesh within them:",
                "pd-profile --shards times parts of operators, and pd-profile --network the links.",
            ]
        if comparison.compute.change < 0:
            return [
                "Passes took less than in the profile: the machine was busier when it was made.",
                f"Repeat it, or correct it by this run: pd-optimize GRAPH --calibrate {folder}.",
            ]
        if run.device != "cpu":
            return [
                "Passes took longer than in the profile: the GPU is slower, or had other work.",
                f"pd-optimize GRAPH --calibrate {folder} corrects them by this run.",
            ]
        cluster = run.plan.cluster
        used = {rank for stage in run.plan.stages for rank in stage.ranks}
        workers = max(Counter(rank // cluster.machines[0] for rank in used).values())
        return [
            f"Passes took longer than in the profile: with other processes at work (pd-profile"
            f" --workers {workers}), or on a machine",
            f"with other load. pd-optimize GRAPH --calibrate {folder} corrects them by this run.",
        ]
    if run.plan.cluster.measured:
        return ["Messages took other times than were measured: repeat pd-profile --network."]
    return [
        "The network was not measured: pd-profile --network does that, or pd-optimize --cluster",
        "auto where all workers are on one machine.",
    ]

"""Runs whose measurements are given."""

from collections.abc import Sequence
from typing import Any

from pipedream.graph.measured_run import MeasuredRank, MeasuredRun
from pipedream.graph.plan import Plan, workers_by_rank
from pipedream.graph.profile import Quartiles


def spread(milliseconds: float) -> Quartiles:
    return Quartiles(
        median=milliseconds * 1e-3,
        lower=milliseconds * 0.99e-3,
        upper=milliseconds * 1.02e-3,
    )


def measured(
    plan: Plan,
    times: Sequence[Sequence[float]],
    update: float | None = None,
    **fields: Any,
) -> MeasuredRun:
    """`times[stage]`: (forward, backward) in milliseconds, of every replica."""
    ranks = [
        MeasuredRank(
            rank=rank,
            stage=stage,
            replica=replica,
            minibatches=40,
            forward=spread(times[stage][0]),
            backward=spread(times[stage][1]),
            updates=40 if update else 0,
            update=spread(update) if update else None,
        )
        for rank, workers in workers_by_rank(plan.rank_assignment).items()
        for stage, replica in workers
    ]
    known: dict[str, Any] = {
        "device": "cpu",
        "threads": 1,
        "batch_size": 8,
        "schedule": plan.schedule,
    }
    known |= {"seconds_per_minibatch": 0.01, "ranks": ranks, "plan": plan}
    return MeasuredRun(**(known | fields))

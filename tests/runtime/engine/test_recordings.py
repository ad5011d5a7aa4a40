"""Passes that are done again as they were recorded: they learn what others learn.

A GPU's graphs read and write the same memory each time, as `tape` does here. Microbatches in flight
must not share it, and nothing that others still need may stay in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tape
from job_cases import ordered, straight
from training import losses, run_jobs, weights

from pipedream.graph.errors import UserError
from pipedream.runtime.run.job import Job


def jobs_of(folder: Path, name: str, **changes: object) -> Sequence[Job]:
    made = folder / name
    made.mkdir()
    changes = {"evaluate_every": 1, "microbatches": 5, **changes}
    jobs = straight(made, (1, 1, 1), ("flush", "gpipe"), drop_last=False, **changes)
    return [
        *straight(made, (2, 1), ("flush",), "Noisy", **changes),
        *jobs,
        *map(recomputing, jobs),
        *ordered(made, ["zb-h1", "zb-v"], **changes),
    ]


def recomputing(job: Job) -> Job:
    """In all stages but the last. A recording is another microbatch's once its outputs are sent."""
    *first, last = job.plan.stages
    stages = (*(stage.model_copy(update={"recompute": True}) for stage in first), last)
    plan = job.plan.model_copy(update={"stages": stages})
    return replace(job, plan=plan, run=job.run.with_name(f"{job.run.name} recomputing"))


@pytest.mark.slow
def test_recorded_passes_learn_the_same(tmp_path: Path) -> None:
    """Dropout, batch norm, replicas, clipping, several microbatches in flight, stages that share a
    rank, backward passes in halves, and a smaller last microbatch, which is not recorded.
    """
    plain = jobs_of(tmp_path, "plain", clip_norm=0.05)
    recorded = jobs_of(tmp_path, "recorded", clip_norm=0.05, cuda_graphs=True)
    run_jobs([*plain, *recorded], prepare=tape.install)
    for job, other in zip(plain, recorded, strict=True):
        assert losses(other) == pytest.approx(losses(job), rel=1e-9)
        learned = weights(other)
        for name, tensor in weights(job).items():
            assert learned[name].allclose(tensor, rtol=1e-9, atol=1e-9), (job.run, name)


@pytest.mark.parametrize(
    ("changes", "schedule", "why"),
    [
        (
            {"cuda_graphs": True},
            "flush",
            "cuda_graphs: passes are recorded on GPUs, and",
        ),
        ({"compile": "reduce-overhead"}, "flush", "compile: reduce-overhead: passes are recorded"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    tmp_path: Path, changes: dict[str, object], schedule: str, why: str
) -> None:
    (job,) = straight(tmp_path, (1, 1), (schedule,), **changes)
    with pytest.raises(UserError, match=why):
        job.check()

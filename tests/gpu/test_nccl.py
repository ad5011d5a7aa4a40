"""Runs on NCCL, for a machine whose ranks have a GPU each: they learn what they do with gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from job_cases import CASES, TYPES, assert_learned_alike, on_gpus, ordered
from training import run_jobs

from pipedream.runtime.run.job import Job

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="there are no two GPUs"),
]


def learn_alike(jobs: list[Job]) -> None:
    jobs = [job for job in jobs if job.plan.workers <= GPUS]
    if not jobs:
        pytest.skip(f"there are {GPUS} GPUs")
    others = on_gpus(jobs)
    run_jobs([*jobs, *others])
    for job, other in zip(jobs, others, strict=True):
        assert_learned_alike(job, other)


@pytest.mark.parametrize("case", CASES | TYPES)
def test_every_case(tmp_path: Path, case: str) -> None:
    learn_alike(list((CASES | TYPES)[case](tmp_path)))


def test_every_order(tmp_path: Path) -> None:
    learn_alike(ordered(tmp_path, ["interleaved", "zb-h2", "v-half", "v-min", "auto"]))

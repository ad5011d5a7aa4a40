"""Runs of pd-train in the order that NCCL has (`strict_nccl`): none hangs, all learn as with gloo.

On NCCL every pipeline hung at its first minibatch: rank 0 posted the receive of a gradient, rank 1
that of an activation, and each waited to be connected by the other's send.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import strict_nccl
from job_cases import CASES
from training import losses, run_jobs

_LONG = ("orders", "orders with replicas", "meshes")


@pytest.mark.slow
@pytest.mark.parametrize("streams", [None, pytest.param(16, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=pytest.mark.thorough) if each in _LONG else each for each in CASES],
)
def test_no_run_hangs_and_all_learn_as_with_gloo(
    tmp_path: Path, case: str, streams: int | None
) -> None:
    learned = []
    for name, setting in (("gloo", None), ("nccl", partial(strict_nccl.install, streams))):
        folder = tmp_path / name
        folder.mkdir()
        jobs = CASES[case](folder)
        run_jobs(jobs, prepare=setting)
        learned.append([losses(job) for job in jobs])
    assert learned[0] == learned[1]

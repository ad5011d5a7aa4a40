"""The main figures that a run prints at its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipedream.runtime.report.page.finished_run import FinishedRun
from pipedream.runtime.report.summary import write_summary
from pipedream.runtime.report.utilisation import Utilisation

SUMMARY: dict[str, Any] = {
    "seconds_per_minibatch": 0.004,
    "predicted_seconds_per_minibatch": 0.008,
    "samples_per_second": 4000.0,
    "final_loss": 0.5,
    "ranks": [
        {"rank": 0, "peak_memory_bytes": 2e6, "updates_left_out": 0}
        | {"predicted_memory_bytes": 1e6, "reserved_memory_bytes": None, "rest_of_gpu_bytes": None}
    ],
}


def finished(folder: Path, steady: bool, planned_batch: int) -> FinishedRun:
    """A run of minibatches of 16."""
    plan = SimpleNamespace(batch_size=planned_batch)
    job: Any = SimpleNamespace(
        run=folder,
        plan=plan,
        has_planned_batch=planned_batch == 16,
        has_planned_compile=True,
        config=SimpleNamespace(compile=None),
    )
    return FinishedRun(job, SUMMARY, Utilisation(1.0, 1, {}, steady), None)


def test_says_what_the_figures_are_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_summary(finished(tmp_path, steady=True, planned_batch=32), "")
    assert capsys.readouterr().out.splitlines()[:3] == [
        "time per minibatch  4 ms, expected 8 ms",
        "samples per second  4000 in the steady state",
        "planned             for minibatches of 32, unlike this run's",
    ]
    write_summary(finished(tmp_path, steady=False, planned_batch=16), "")
    assert capsys.readouterr().out.splitlines()[1:] == [
        "samples per second  4000",
        "final loss          0.5000",
        "memory              2 MB on rank 0, planned 1 MB",
        f"Written: {tmp_path}/summary.json, metrics.jsonl, checkpoints",
    ]


def test_memory_on_a_gpu_is_what_torch_holds_and_what_it_does_not_know_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(tmp_path, steady=True, planned_batch=16)
    (rank,) = SUMMARY["ranks"]
    on_gpu = rank | {"reserved_memory_bytes": 3e6, "rest_of_gpu_bytes": 5e8}
    write_summary(replace(run, summary=SUMMARY | {"ranks": [on_gpu]}), "")
    assert (
        "memory              2 MB on rank 0, planned 1 MB;"
        " torch reserved 3 MB, the rest on the GPU is 500 MB\n"
    ) in capsys.readouterr().out

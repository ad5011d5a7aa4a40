"""The main figures that a run prints at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipedream.runtime.report.summary import write_summary

SUMMARY: dict[str, Any] = {
    "seconds_per_minibatch": 0.004,
    "predicted_seconds_per_minibatch": 0.008,
    "samples_per_second": 4000.0,
    "final_loss": 0.5,
    "ranks": [
        {"rank": 0, "peak_memory_bytes": 2e6, "updates_left_out": 0}
        | {"predicted_memory_bytes": 1e6}
    ],
}


def test_says_what_the_figures_are_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_summary(tmp_path, SUMMARY, "", steady=True, planned_for=32)
    assert capsys.readouterr().out.splitlines()[:3] == [
        "time per minibatch  4 ms, expected 8 ms",
        "samples per second  4000 in the steady state",
        "planned             for minibatches of 32, unlike this run's",
    ]
    write_summary(tmp_path, SUMMARY, "", steady=False, planned_for=None)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "samples per second  4000",
        "final loss          0.5000",
        "memory              2 MB on rank 0, planned 1 MB",
        f"Written: {tmp_path}/summary.json, metrics.jsonl, checkpoints",
    ]

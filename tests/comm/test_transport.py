"""Messages between ranks of real runs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import small_models
import torch
from plans import cut, make_plan
from training import run_jobs

from pipedream.capture.export import capture
from pipedream.graph.run_config import DataFactory, Factory, OptimizerConfig, RunConfig
from pipedream.runtime.run.job import Job
from pipedream.schedule.action import Kind, parse_action

SUPPORT = Path(small_models.__file__).parent


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["weight-stashing", "flush"])
def test_a_stage_that_learns_nothing_waits_for_the_others(tmp_path: Path, schedule: str) -> None:
    """It had no gradients to wait for, and ran ahead of all other stages: all that it sent waited
    in memory, and a flush run that took 640 ms per minibatch said 0.9, by rank 0's clock.
    """
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="small_models:FrozenFirst"),
        data=DataFactory(source="small_models:regression", args={"examples": 64}),
        loss="mse_loss",
        optimizer=OptimizerConfig(name="SGD", args={"lr": 0.1}),
        batch_size=4,
    )
    graph = capture(small_models.FrozenFirst(), (torch.randn(4, 6),)).graph
    plan = make_plan(graph, cut(graph, 2), (1, 1), schedule=schedule)
    job = Job(plan, config, SUPPORT, tmp_path)
    run_jobs([job])
    with (tmp_path / "timeline.csv").open() as file:
        rows = [(parse_action(row["action"]), row) for row in csv.DictReader(file)]
    ends = {(a.stage, a.kind, a.minibatch): float(row["end_seconds"]) for a, row in rows}
    waits = {b: end for (_, kind, b), end in ends.items() if kind is Kind.RECV_GRADIENT}
    backward = {b: end for (stage, kind, b), end in ends.items() if (stage, kind) == (1, "B")}
    assert len(waits) == len(backward) == 16
    late = 2e-3  # seconds by which two ranks' clocks may differ
    assert all(waits[minibatch] > backward[minibatch] - late for minibatch in waits)

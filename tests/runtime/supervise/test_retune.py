"""A plan made from wrong times: it is measured, made again, and trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sleeping_layers
import torch
from commands import typed
from training import losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.graph.measured_run import read_measured
from pipedream.graph.model import Graph, format_graph
from pipedream.graph.plan import Plan, read_plan
from pipedream.graph.run_config import read_config
from pipedream.runtime.run.job import Job

SUPPORT = Path(sleeping_layers.__file__).parent
CONFIG = """\
format: pipedream-run/1
model: {source: "sleeping_layers:chain"}
data: {source: "sleeping_layers:data", args: {examples: 480}}
loss: mse_loss
optimizer: {name: AdamW, args: {lr: 0.01}}
batch_size: 2
dtype: float64
microbatches: 8
epochs: 2
"""
MINIBATCHES = 2 * 240


def made(folder: Path, times: float, **changes: Any) -> Path:
    """Plans for two workers, with the last layer that sleeps taken to sleep so many times as long,
    in `plan`.
    """
    graph = capture(sleeping_layers.chain(), (torch.randn(2, 6),)).graph
    asleep = [name for name, node in graph.nodes.items() if node.description == "Layer"]
    assert len(asleep) == 6
    seconds = dict.fromkeys(asleep, sleeping_layers.SECONDS)
    seconds[asleep[-1]] *= times
    nodes = {
        name: replace(
            node,
            forward_seconds=seconds.get(name, 1e-5),
            backward_seconds=seconds.get(name, 1e-5),
        )
        for name, node in graph.nodes.items()
    }
    (folder / "graph.txt").write_text(format_graph(Graph(nodes, graph.edges)))
    (folder / "run.yaml").write_text(CONFIG)
    links = ["--machines", "2", "--bandwidth", "1GB", "--straight", "--schedule", "flush"]
    done = typed(folder, ["pd-optimize", "graph.txt", *links, "--microbatches", "8", "-o", "plan"])
    assert done.code == 0, done.error
    return folder / "plan/plan.json"


def layers(plan: Plan) -> list[int]:
    """How many layers that sleep each stage has."""
    asleep = {n.id for n in plan.graph.nodes if n.description == "Layer"}
    return [len(asleep.intersection(stage.nodes)) for stage in plan.stages]


def job_of(folder: Path, **changes: Any) -> Job:
    path = folder / "plan/plan.json"
    config = read_config(folder / "run.yaml")
    job = Job(read_plan(path), config, SUPPORT, folder / "run", schedule="flush", epochs=2)
    return replace(job, save_every=80, retune=path, **changes)


def test_a_plan_of_wrong_times_is_changed(tmp_path: Path) -> None:
    """Of six equal layers one was profiled five times too long. Losses and weights are those of a
    run under either plan.
    """
    plan = made(tmp_path, 5)
    assert layers(read_plan(plan)) == [5, 1]
    train = ["pd-train", "plan/plan.json", "--config", "run.yaml", "-o", "run", "--retune"]
    done = typed(tmp_path, [*train, "--save-every", "80"], seconds=120)
    assert done.code == 0, done.error
    lines = [line for line in done.error.splitlines() if "--retune" in line]
    assert "goes on under run/retune-1/plan.json at the next checkpoint: 1 + 1" in lines[0]
    assert layers(read_plan(tmp_path / "run/retune-1/plan.json")) == [3, 3]
    assert layers(read_measured(tmp_path / "run/measured.json").plan) == [3, 3]
    assert len(lines) == 2, done.error
    assert "the plan stays" in lines[1]
    before = read_measured(tmp_path / "run/retune-1/measured.json")
    after = read_measured(tmp_path / "run/measured.json")
    assert layers(before.plan) == [5, 1]
    assert after.seconds_per_minibatch < 0.8 * before.seconds_per_minibatch
    whole = replace(job_of(tmp_path), run=tmp_path / "whole", retune=None, save_every=None)
    run_jobs([whole])
    found = replace(whole, run=tmp_path / "run")
    assert len(losses(found)) == MINIBATCHES
    assert losses(found) == pytest.approx(losses(whole), rel=1e-12)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(found)[name], tensor, rtol=1e-12, atol=1e-12)

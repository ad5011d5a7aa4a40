"""From a profile that is wrong, over a run, to a plan that is better: as a user types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import typed

from pipedream.graph.measured_run import read_measured
from pipedream.graph.model import format_graph, read_graph
from pipedream.graph.plan import Plan, read_plan
from pipedream.graph.profile import read_profile

MODEL = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

WIDTH = 384


def deep():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def data():
    x = torch.randn(40 * 64, WIDTH, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.tanh()), None
"""

CONFIG = """\
format: pipedream-run/1
model: {source: "deep_model:deep"}
data: {source: "deep_model:data"}
loss: mse_loss
optimizer: {name: SGD, args: {lr: 0.01}}
batch_size: 64
"""


def optimize(folder: Path, command: str) -> str:
    """What `pd-optimize` prints; it must succeed."""
    done = subprocess.run(
        [Path(sys.executable).with_name("pd-optimize"), *command.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def layers(plan: Plan) -> list[int]:
    """How many layers each stage has."""
    kinds = {node.id: node.description for node in plan.graph.nodes}
    return [sum("Linear" in kinds[name] for name in stage.nodes) for stage in plan.stages]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six equal layers; by the profile the first takes five times as long as any other, and all so
    long that nothing else on a busy machine counts: the plan was another one there. In `run`, a run
    under the plan for that.
    """
    folder = tmp_path_factory.mktemp("after")
    (folder / "deep_model.py").write_text(MODEL)
    (folder / "deep.yaml").write_text(CONFIG)
    profile = ["pd-profile", "deep.yaml", "-o", "profile", "--warmup", "1", "--repeats", "30"]
    done = typed(folder, profile)
    assert done.code == 0, done.error
    graph = read_graph(folder / "profile/graph.txt")
    linear = [name for name in graph.order if "Linear" in graph.nodes[name].description]
    wrong = graph.with_nodes(
        replace(graph.nodes[name], forward_seconds=seconds, backward_seconds=seconds)
        for name, seconds in zip(linear, [50e-3, *[10e-3] * 5], strict=True)
    )
    (folder / "profile/graph.txt").write_text(format_graph(wrong))
    planned = "profile/graph.txt --machines 2 --bandwidth 10GB --straight --optimizer sgd -o plan"
    optimize(folder, planned)
    train = ["pd-train", "plan/plan.json", "--config", "deep.yaml", "-o", "run"]
    done = typed(folder, train, seconds=100)
    assert done.code == 0, done.error
    assert "measured.json" in done.out
    return folder


@pytest.mark.slow
def test_what_was_measured_can_be_read(folder: Path) -> None:
    measured = read_measured(folder / "run/measured.json")
    assert (measured.batch_size, measured.device, measured.threads) == (64, "cpu", 1)
    assert measured.plan.stages == read_plan(folder / "plan/plan.json").stages
    assert measured.plan.asked is not None
    assert measured.plan.asked.profile == "../profile/profile.json"
    first, last = measured.ranks
    assert 10 <= first.minibatches == last.minibatches < 40
    assert first.updates == first.minibatches
    # Five layers and one; a machine with other work to do may be three times slower in between.
    assert last.forward.median > first.forward.median
    assert measured.slowest[0] == 1
    summary = json.loads((folder / "run/summary.json").read_text())
    assert measured.slowest[1] < 2 * summary["seconds_per_minibatch"]


@pytest.mark.slow
def test_the_next_plan_is_nearer_to_the_truth(folder: Path) -> None:
    assert layers(read_plan(folder / "plan/plan.json")) == [1, 5]
    shown = optimize(folder, "profile/graph.txt --calibrate run -o better")
    plan = read_plan(folder / "better/plan.json")
    assert plan.replicas == (1, 1)
    assert 2 <= layers(plan)[0] <= 4
    assert re.search(r"The best plan now is \d+\.\d% faster than the plan of run: ", shown)
    for word in ("predicted before", "predicted now", "measured", "profiled", "simulated"):
        assert word in shown
    corrected = read_graph(folder / "better/graph.txt")
    assert corrected.fingerprint == plan.graph.fingerprint


@pytest.mark.thorough
@pytest.mark.slow
def test_stages_of_the_run_now_take_what_was_measured(folder: Path) -> None:
    optimize(folder, "profile/graph.txt --calibrate run -o better")
    corrected = read_graph(folder / "better/graph.txt")
    measured = read_measured(folder / "run/measured.json")
    calls = read_profile(folder / "profile/profile.json").training_overheads
    stages = len(measured.plan.stages)
    for rank, stage in zip(measured.ranks, measured.plan.stages, strict=True):
        nodes = [corrected.nodes[name] for name in stage.nodes]
        rounding = len(nodes) * 0.5e-6  # graph.txt has whole microseconds
        beside = calls.of_stage(stage.stage, stages)
        forward = beside[0] + sum(node.forward_seconds for node in nodes)
        assert forward == pytest.approx(rank.forward.median, abs=rounding)
        backward = beside[1] + sum(node.backward_seconds for node in nodes)
        assert backward == pytest.approx(rank.backward.median, abs=rounding)


@pytest.mark.thorough
@pytest.mark.slow
def test_what_has_been_corrected_needs_no_correction(folder: Path) -> None:
    """Up to whole microseconds: the plan is the same, and so is the next."""
    optimize(folder, "profile/graph.txt --calibrate run -o better")
    shown = optimize(folder, "better/graph.txt --calibrate run --calibrate run -o again")
    first, second = (read_plan(folder / name / "plan.json") for name in ("better", "again"))
    assert layers(first) == layers(second)
    rows = [line.split() for line in shown.splitlines()]
    stages = [row for row in rows if len(row) == 13 and row[0] in ("0", "1")]
    factors = [float(row[times]) for row in stages for times in (7, 12)]
    assert factors == pytest.approx([1.0] * 8, abs=0.011)

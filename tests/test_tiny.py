"""All three tools on a tiny model, as a user types them: in seconds, touching everything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import typed

from pipedream.graph.model import read_graph
from pipedream.graph.plan import read_plan

MODEL = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        y = torch.tanh(self.first(x))
        return self.out(x + torch.tanh(self.second(y)))


def data(examples):
    x = torch.randn(examples, 4, generator=torch.Generator().manual_seed(0))
    whole = TensorDataset(x, (x.sum(1) > 0).long())
    return TensorDataset(*whole[:-16]), TensorDataset(*whole[-16:])
"""

CONFIG = """\
format: pipedream-run/1
model: {source: "tiny_model:Skip"}
data: {source: "tiny_model:data", args: {examples: 80}}
optimizer: {name: SGD, args: {lr: 0.5}}
batch_size: 8
epochs: 4
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's own folder: a model, its data, a run config."""
    (tmp_path / "tiny_model.py").write_text(MODEL)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    return tmp_path


def run(folder: Path, command: str) -> str:
    """What a command prints; it must succeed."""
    done = typed(folder, command.split())
    assert done.code == 0, f"{command}\n{done.out}{done.error}"
    return done.out + done.error


@pytest.mark.slow
def test_a_model_becomes_a_trained_pipeline(folder: Path) -> None:
    run(folder, "pd-profile tiny.yaml -o profile --warmup 1 --repeats 2")
    graph = read_graph(folder / "profile/graph.txt")
    assert [n.description for n in graph.nodes.values()].count(
        "Linear(in_features=4, out_features=4, bias=True)"
    ) == 2
    assert sum(node.parameter_bytes for node in graph.nodes.values()) == 4 * (2 * 20 + 10)

    shown = run(
        folder,
        "pd-optimize profile/graph.txt --machines 2 --bandwidth 10GB --straight -o plan",
    )
    plan = read_plan(folder / "plan/plan.json")
    assert (plan.workers, plan.replicas) == (2, (1, 1))
    assert plan.graph.fingerprint == graph.fingerprint
    staged = read_graph(folder / "plan/graph.txt")
    assert {name: node.stage for name, node in staged.nodes.items()} == plan.stage_of
    assert "stage" in shown.lower()

    run(folder, "pd-train plan/plan.json --config tiny.yaml --workers 2 -o run")
    summary = json.loads((folder / "run/summary.json").read_text())
    assert summary["held_out_accuracy"] >= 0.75
    assert summary["final_loss"] < 0.6
    assert summary["seconds_per_minibatch"] > 0
    assert summary["samples_per_second"] > 0
    assert len(summary["ranks"]) == 2
    for made in ("stage0.py", "stage1.py", "metrics.jsonl", "timeline.png", "checkpoints"):
        assert (folder / "run" / made).exists(), made

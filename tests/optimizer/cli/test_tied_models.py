"""From the profile of a model with tied weights to a trained one, with no option of a schedule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import typed
from small_models import Tied

import pipedream
from pipedream.graph.profile import read_profile

RUN = """
format: pipedream-run/1
model: {{source: "models:{model}"}}
data: {{source: "models:data"}}
loss: "models:loss"
optimizer: {{name: SGD, args: {{lr: 0.1}}}}
batch_size: 4
"""

MODELS = """
import torch
from small_models import Tied
from torch.utils.data import TensorDataset


def Frozen():
    model = Tied()
    model.a.linear.weight.requires_grad_(False)
    return model


def data():
    torch.manual_seed(0)
    return TensorDataset(torch.randn(32, 6), torch.randn(32, 6))


def loss(output, target):
    return (output - target).square().mean()
"""


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_the_default_plan_trains(tmp_path: Path, frozen: bool) -> None:
    """A straight pipeline: with a flush if the weight learns, in any case if it does not."""
    model = Tied()
    model.a.linear.weight.requires_grad_(not frozen)
    profiled = pipedream.profile(model, torch.randn(4, 6), repeats=2, warmup=1)
    profiled.write(tmp_path)
    shared = read_profile(tmp_path / "profile.json").shared
    assert shared is not None
    assert [each.learns for each in shared.values()] == [not frozen]
    planned = pipedream.optimize(profiled, machines=3, bandwidth="10GB", straight=True)
    assert planned.plan.schedule == ("weight-stashing" if frozen else "flush")
    assert ("Shared: a.linear.weight" in planned.report) == (not frozen)
    assert len(planned.plan.stages) == 3
    planned.write(tmp_path / "plan")
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "run.yaml").write_text(RUN.format(model="Frozen" if frozen else "Tied"))
    command = ["pd-train", "plan/plan.json", "--config", "run.yaml", "-o", "run"]
    done = typed(tmp_path, command, seconds=300)
    assert done.code == 0, done.error
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").open()]
    assert losses[-1] < losses[0]

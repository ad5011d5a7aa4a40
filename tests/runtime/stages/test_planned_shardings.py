"""Shardings that pd-optimize finds, run by pd-train as the plan says them, learn what the plain
model does: from the profile on, with no word about placements.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import typed
from found_plans import divisions, planned, profiled, train_plans
from sharded_results import assert_equal
from sharded_runs import captured

from pipedream.runtime.stages import planned_passes
from pipedream.runtime.stages.planned_passes import PlannedPasses
from pipedream.runtime.stages.randomness import MinibatchRng
from pipedream.runtime.stages.stage_module import StageModule
from pipedream.sharding.assignment import Assignment
from pipedream.sharding.propagate import propagate

SLOW = {"optimizer": {"name": "SGD", "args": {"lr": 0.001, "momentum": 0.9}}}
"""With larger steps a narrow ResNet is chaotic: differences in the last digit grow."""


@pytest.mark.slow
@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("model", "machines", "options"),
    [
        ("Fused", "2", ("--mesh", "2")),
        ("Perceptron", "4", ("--mesh", "2,2")),
        ("VGG", "4", ("--mesh", "4")),
        ("resnet18", "2", ("--mesh", "2")),
        ("Separate", "4", ("--mesh", "2", "--straight")),
        ("TiedWords", "4", ("--mesh", "2,2")),
        ("Fused", "4", ("--mesh", "2", "--straight")),
        ("Perceptron", "2", ("--mesh", "2", "--intra-op", "recursive")),
        # Stages that begin after recurrent layers, where tensors lie in memory otherwise.
        ("Recurrent", "4", ("--mesh", "2", "--straight")),
    ],
)
def test_learns_what_the_plain_model_does(
    tmp_path: Path, model: str, machines: str, options: tuple[str, ...]
) -> None:
    profiled(tmp_path, model)
    plan = planned(tmp_path, "--machines", machines, *options)
    alone = planned(tmp_path, "--machines", "1", name="alone")
    assert divisions(plan), "nothing is divided"
    changes = SLOW if model == "resnet18" else {}
    train_plans(tmp_path, model, {"meshes": plan, "alone": alone}, **changes)
    assert_equal(tmp_path / "meshes", tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [("--mesh", "2"), ("--mesh", "2", "--split", "blocks.0.up")])
def test_ranks_search_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """Each operator of a stage's own trace is found in the plan, and divided so. The stages are
    given, since those that begin within an attention lay out values anew, which no plan knows of.
    """
    profiled(tmp_path, "Fused", dtype="float32")
    plan = planned(tmp_path, "--machines", "4" if "--split" in options else "2", *options)
    whole = captured("Fused")
    seen: list[tuple[Assignment, Mapping[str, Any]]] = []

    def noted(graph: Any, mesh: Any, requests: Any, seconds: Any, decided: Any) -> Assignment:
        assignment = propagate(graph, mesh, requests, seconds, decided)
        seen.append((assignment, decided))
        return assignment

    monkeypatch.setattr(planned_passes, "propagate", noted)
    for stage in plan.stages:
        form = StageModule.of(whole, plan, stage.stage, MinibatchRng(0, torch.device("cpu")))
        names = {name for name, _ in form.piece.module.named_parameters()}
        form.program.planned = PlannedPasses.of(plan, stage.stage, 0, names)
        values = {
            name: torch.zeros(whole.values[name].shape, dtype=whole.values[name].dtype)
            for name in form.piece.inputs
        }
        form.program.on_mesh(dict(form.piece.module.named_parameters()), values)
    assert len(seen) == len(plan.stages)
    for assignment, decided in seen:
        missing: Collection[str] = {c.name for c in assignment.graph.calls} - decided.keys()
        assert not missing
        assert all(assignment.strategies[name] == own for name, own in decided.items())


def test_a_plan_that_its_operators_cannot_follow_is_told_in_one_line(tmp_path: Path) -> None:
    profiled(tmp_path, "Perceptron", dtype="float32")
    planned(tmp_path, "--machines", "2", "--mesh", "2")
    path = tmp_path / "plan/plan.json"
    text = json.loads(path.read_text())
    (entry, *_) = (
        each
        for each in text["stages"][0]["placements"]["operators"]
        if any(line.startswith("aten.addmm") for line in each["forward"])
    )
    entry["forward"] = [
        "aten.addmm.default: S(0); S(0); S(0) -> S(0)" if line.startswith("aten.addmm") else line
        for line in entry["forward"]
    ]
    path.write_text(json.dumps(text))
    done = typed(tmp_path, ["pd-train", "plan/plan.json", "--config", "run.yaml", "-o", "run"])
    assert done.code == 2
    (line,) = (each for each in done.error.splitlines() if "cannot be divided as the plan" in each)
    assert "stage 0: placements.operators: aten.addmm.default of shapes" in line

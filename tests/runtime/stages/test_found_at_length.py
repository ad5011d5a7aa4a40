"""Plans that pd-optimize finds for other people's kinds of models, on 2, 4 and 8 processes, learn
what the same stages do without meshes, and under a flush what the plain model does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from found_plans import divisions, planned, profiled, train_plans, without_meshes
from sharded_results import assert_equal

MODELS = ("Perceptron", "Fused", "Grouped", "VGG", "resnet18", "Recommender")
SMALL = {"optimizer": {"name": "SGD", "args": {"lr": 0.001, "momentum": 0.9}}}
"""With larger steps these are chaotic: differences in the last digit grow."""
WHERE = {
    "flush on 2": ("2", "--mesh", "2"),
    "flush on 4": ("4", "--mesh", "2,2"),
    "flush on 8": ("8", "--mesh", "2", "--straight"),
    "2bw on 2": ("2", "--mesh", "2"),
    "2bw on 4": ("4", "--mesh", "2"),
    "2bw on 8": ("8", "--mesh", "2,2", "--straight"),
    "weight-stashing on 2": ("2", "--mesh", "2"),
    "weight-stashing on 4": ("4", "--mesh", "2", "--straight"),
    "weight-stashing on 8": ("8", "--mesh", "2", "--straight"),
}


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("model", MODELS)
def test_learns_what_it_does_without_meshes(tmp_path: Path, model: str, where: str) -> None:
    profiled(tmp_path, model)
    schedule, machines = where.split(" on ")[0], WHERE[where]
    plan = planned(tmp_path, "--machines", *machines, schedule=schedule)
    assert divisions(plan), "nothing is divided"
    plans = {"meshes": plan, "other": without_meshes(plan)}
    if schedule == "flush":
        plans["alone"] = planned(tmp_path, "--machines", "1", name="one")
    train_plans(tmp_path, model, plans, **(SMALL if model == "resnet18" else {}))
    for other in plans.keys() - {"meshes"}:
        assert_equal(tmp_path / "meshes", tmp_path / other)

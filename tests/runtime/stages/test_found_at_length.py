"""Plans that pd-optimize finds for other people's kinds of models, on 2, 4 and 8 processes, learn
what the same stages do without meshes, and under a flush what the plain model does.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from found_plans import divisions, planned, profiled, train_plans, without_meshes
from sharded_results import assert_equal
from torch import Tensor

from pipedream.runtime.checkpoint.files import load_all

MODELS = ("Perceptron", "Fused", "Grouped", "Recurrent", "VGG", "resnet18", "Recommender")
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


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("where", ["flush on 2", "flush on 4", "2bw on 4", "flush on 8"])
@pytest.mark.parametrize(
    "model", ["Perceptron", "TiedWords", "Grouped", "Recurrent", "resnet18", "Recommender"]
)
def test_in_bfloat16_it_ends_as_near_to_the_exact_weights(
    tmp_path: Path, model: str, where: str
) -> None:
    """As the same stages without meshes do. Models without dropout, whose draws differ by dtype."""
    changes = SMALL if model == "resnet18" else {}
    schedule, machines = where.split(" on ")[0], WHERE[where]
    low, exact = tmp_path / "low", tmp_path / "exact"
    low.mkdir()
    exact.mkdir()
    profiled(low, model, dtype="bfloat16")
    plan = planned(low, "--machines", *machines, schedule=schedule)
    assert divisions(plan), "nothing is divided"
    other = without_meshes(plan)
    train_plans(low, model, {"meshes": plan, "other": other}, dtype="bfloat16", **changes)
    train_plans(exact, model, {"other": other}, dtype="float64", **changes)
    wanted = load_all(exact / "other" / "checkpoints/latest")
    meshes, alone = (
        distance(load_all(low / name / "checkpoints/latest"), wanted)
        for name in ("meshes", "other")
    )
    assert 0 < meshes <= 1.25 * alone


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Between all weights."""
    assert one.keys() == other.keys()
    return math.hypot(*(float((one[n].double() - other[n].double()).norm()) for n in one))

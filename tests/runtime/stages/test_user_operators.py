"""Operators of the user's own are divided as running them showed, and ranks run them again."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import typed
from found_plans import planned, profiled, train_plans
from sharded_results import assert_equal

GATED = "user_operators.gated.default: S(1); S(1) -> S(1)"
MESH = ("--machines", "2", "--mesh", "2", "--shard", "up=S(0)")


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_learns_what_the_plain_model_does(tmp_path: Path) -> None:
    profiled(tmp_path, "Gated")
    meshes = planned(tmp_path, *MESH, name="meshes")
    assert GATED in (tmp_path / "meshes" / "plan.json").read_text()
    alone = planned(tmp_path, "--machines", "1", name="alone")
    train_plans(tmp_path, "Gated", {"meshes": meshes, "alone": alone})
    assert_equal(tmp_path / "meshes", tmp_path / "alone")


def test_a_plan_that_divides_one_wrongly_is_refused(tmp_path: Path) -> None:
    """As where its code has changed since: here the plan says that gates may be terms of a sum."""
    profiled(tmp_path, "Gated")
    planned(tmp_path, *MESH)
    path = tmp_path / "plan" / "plan.json"
    path.write_text(path.read_text().replace(GATED, GATED.replace("S(1); S(1)", "S(1); P")))
    done = typed(tmp_path, ["pd-train", "plan/plan.json", "--config", "run.yaml", "-o", "run"])
    assert done.code == 2
    assert "user_operators.gated.default" in done.error
    assert "profile the model again" in done.error or "make the plan again" in done.error
    assert "Traceback" not in done.error

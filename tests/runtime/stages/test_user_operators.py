"""Operators of the user's own are divided as running them showed, and ranks run them again."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from commands import typed
from sharded_results import assert_equal
from training import run_jobs

from pipedream.graph.plan import Plan, read_plan
from pipedream.graph.run_config import RunConfig, read_config
from pipedream.runtime.run.job import Job

GATED = "user_operators.gated.default: S(1); S(1) -> S(1)"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = {
        "format": "pipedream-run/1",
        "model": {"source": "user_operators:Gated"},
        "data": {"source": "user_operators:points"},
        "batch_size": 4,
        "drop_last": True,
        "epochs": 1,
        "seed": 3,
        "dtype": "float64",
        "optimizer": {"name": "SGD", "args": {"lr": 0.05, "momentum": 0.9}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(text))
    return read_config(tmp_path / "run.yaml")


def planned(folder: Path, name: str, *options: str) -> Plan:
    fast = ("--bandwidth", "1TB", "--schedule", "flush", "--microbatches", "1")
    done = typed(folder, ["pd-optimize", "graph.txt", *fast, "-o", name, *options])
    assert done.code == 0, done.error
    return read_plan(folder / name / "plan.json")


def test_learns_what_the_plain_model_does(tmp_path: Path, config: RunConfig) -> None:
    done = typed(tmp_path, ["pd-profile", "run.yaml", "-o", ".", "--repeats", "2"])
    assert done.code == 0, done.error
    meshes = planned(tmp_path, "meshes", "--machines", "2", "--mesh", "2", "--shard", "up=S(0)")
    assert GATED in (tmp_path / "meshes" / "plan.json").read_text()
    alone = planned(tmp_path, "alone", "--machines", "1")
    jobs = [
        Job(plan, config, tmp_path, tmp_path / name, schedule="flush", epochs=1)
        for name, plan in (("meshes", meshes), ("alone", alone))
    ]
    for job in jobs:
        job.check()
    run_jobs(jobs)
    assert_equal(tmp_path / "meshes", tmp_path / "alone")


def test_a_plan_that_divides_one_wrongly_is_refused(tmp_path: Path, config: RunConfig) -> None:
    """As where its code has changed since: here the plan says that gates may be terms of a sum."""
    done = typed(tmp_path, ["pd-profile", "run.yaml", "-o", ".", "--repeats", "2"])
    assert done.code == 0, done.error
    planned(tmp_path, "plan", "--machines", "2", "--mesh", "2", "--shard", "up=S(0)")
    path = tmp_path / "plan" / "plan.json"
    path.write_text(path.read_text().replace(GATED, GATED.replace("S(1); S(1)", "S(1); P")))
    done = typed(tmp_path, ["pd-train", "plan/plan.json", "--config", "run.yaml", "-o", "run"])
    assert done.code == 2
    assert "user_operators.gated.default" in done.error
    assert "profile the model again" in done.error or "make the plan again" in done.error
    assert "Traceback" not in done.error

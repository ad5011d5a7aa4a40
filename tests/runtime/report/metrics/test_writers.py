"""Whoever gets what a run measures: one of the user's, W&B, MLflow."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from commands import Done, typed
from plans import cut, make_plan

from pipedream.capture.export import capture
from pipedream.graph.errors import UserError
from pipedream.graph.plan import write_plan
from pipedream.graph.run_config import read_config

SUPPORT = Path(small_models.__file__).parent
USERS = SUPPORT / "users"
CONFIG = """\
format: pipedream-run/1
model: {source: "small_models:Noisy"}
data: {source: "small_models:classes"}
optimizer: {name: SGD, args: {lr: 0.25}}
batch_size: 4
evaluate_every: 1
"""
MINIBATCHES = 15


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metrics")
    graph = capture(small_models.Noisy(), (torch.randn(4, 6),)).graph
    write_plan(make_plan(graph, cut(graph, 2), (1, 1)), folder / "plan.json")
    return folder / "plan.json"


def train(folder: Path, plan: Path, metrics: str, *words: str) -> Done:
    (folder / "run.yaml").write_text(f"{CONFIG}metrics: {metrics}\n")
    shutil.copy(USERS / "metrics_writers.py", folder)
    command = ["pd-train", str(plan), "--config", "run.yaml", "-o", "run", *words]
    return typed(folder, command, {"PYTHONPATH": str(SUPPORT)}, seconds=100)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_writer_is_told_everything(plan: Path, tmp_path: Path) -> None:
    metrics = "{source: 'metrics_writers:Lines', args: {name: mine}}"
    done = train(tmp_path, plan, metrics, "--epochs", "2")
    assert done.code == 0, done.error
    run = tmp_path / "run"
    told, calls = lines(run / "metrics.jsonl"), lines(run / "mine")
    (kind, config, step), *_, (last, summary) = calls
    assert (kind, step, last) == ("begin", 0, "end")
    assert config["optimizer"]["args"] == {"lr": 0.25}
    assert (config["schedule"], config["epochs"], config["replicas"]) == (
        "weight-stashing", 2, [1, 1]
    )  # fmt: skip
    assert summary == json.loads((run / "summary.json").read_text())
    minibatches = [call[1:] for call in calls if call[0] == "minibatch"]
    assert minibatches == [[n, line["loss"]] for n, line in enumerate(told)]
    epochs = [call[1:] for call in calls if call[0] == "epoch"]
    held_out = lines(run / "held_out.jsonl")
    for number, (mean, tried) in enumerate([epochs[:2], epochs[2:]], start=1):
        losses = [line["loss"] for line in told if line["epoch"] == number]
        assert mean[:2] == tried[:2] == [number, number * MINIBATCHES]
        assert mean[2]["mean loss"] == pytest.approx(sum(losses) / MINIBATCHES)
        assert tried[2]["held-out loss"] == held_out[number - 1]["held_out_loss"]
    known = [call[2] for call in calls if call[0] == "progress"]
    assert known[-1]["learning rate"] == 0.25
    assert {"samples per second", "busy share/rank 1", "memory in bytes/rank 0"} <= known[-1].keys()


@pytest.mark.thorough
@pytest.mark.slow
def test_a_writer_that_fails_is_left_out(plan: Path, tmp_path: Path) -> None:
    """The run is the one without it; another writer goes on."""
    metrics = "['metrics_writers:Fails', {source: 'metrics_writers:Lines', args: {name: other}}]"
    done = train(tmp_path, plan, metrics)
    assert done.code == 0, done.error
    (line,) = [line for line in done.error.splitlines() if "metrics_writers" in line]
    place = f"{tmp_path / 'metrics_writers.py'}:"
    assert line.startswith(f"pd-train: metrics metrics_writers:Fails: minibatch: {place}")
    assert line.endswith(": ValueError: no more please; the run goes on without it")
    run = tmp_path / "run"
    assert [call[0] for call in lines(run / "calls.jsonl")] == ["begin", "minibatch", "minibatch"]
    assert sum(call[0] == "minibatch" for call in lines(run / "other")) == MINIBATCHES
    assert lines(run / "other")[-1][0] == "end"
    assert len(lines(run / "metrics.jsonl")) == MINIBATCHES
    assert (run / "summary.json").exists()


@pytest.mark.slow
def test_a_run_that_fails_says_so_to_its_writers(plan: Path, tmp_path: Path) -> None:
    done = train(tmp_path, plan, "metrics_writers:Lines\nloss: 'small_models:nowhere'")
    assert done.code == 2
    assert "look for nan in the data" in done.error
    assert lines(tmp_path / "run/calls.jsonl")[-1] == ["end", None]


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        (
            "metrics_writers:Refuses",
            "metrics_writers:Refuses: begin: .*py:\\d+: KeyError: 'project'",
        ),
        (
            "{source: 'metrics_writers:Refuses', args: {leave: true}}",
            "metrics_writers:Refuses: begin: .*py:\\d+: SystemExit: bye",
        ),
        ("metrics_writers:Missing", "metrics_writers:Missing: metrics_writers .*has no 'Missing'"),
        ("metrics_writers:NoWriter", "this is not a subclass of pipedream.MetricsWriter"),
        ("{source: 'metrics_writers:Lines', args: {nam: x}}", "unexpected keyword argument 'nam'"),
        ("nothing_here:X", "there is no module nothing_here"),
    ],
)
def test_a_writer_that_cannot_begin_ends_the_run(
    metrics: str, problem: str, plan: Path, tmp_path: Path
) -> None:
    done = train(tmp_path, plan, metrics)
    assert done.code == 2
    assert sum(re.search(problem, line) is not None for line in done.error.splitlines()) == 1
    assert "Traceback" not in done.error
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        (
            "comet",
            "metrics.0.source: write tensorboard, wandb, mlflow or package.module:Class",
        ),
        ("3", "metrics.0: "),
        ("[{sauce: wandb}]", "metrics.0.sauce: unknown field"),
    ],
)
def test_names_that_are_none(metrics: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{CONFIG}metrics: {metrics}\n")
    with pytest.raises(UserError) as refused:
        read_config(tmp_path / "run.yaml")
    assert problem in refused.value.format_message()

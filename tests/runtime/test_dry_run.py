"""`pd-train --dry-run`: what would stop a run is found without one, and nothing is left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import small_models
import torch
from commands import typed
from plans import cut, make_plan

from pipedream.capture.export import capture
from pipedream.graph.plan import write_plan

VARIABLES = {"PYTHONPATH": str(Path(small_models.__file__).parent)}
CONFIG = """\
format: pipedream-run/1
model: {source: "small_models:Noisy"}
data: {source: "small_models:classes"}
optimizer: {name: SGD, args: {lr: 0.1, momentum: 0.9}}
batch_size: 4
clip_norm: 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    graph = capture(small_models.Noisy(), (torch.randn(4, 6),)).graph
    write_plan(make_plan(graph, cut(graph, 2), (1, 1)), tmp_path / "plan.json")
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name[0] != "."}


def test_a_run_that_would_go_well(folder: Path) -> None:
    done = typed(folder, ["pd-train", "plan.json", "--config", "run.yaml", "--dry-run"], VARIABLES)
    assert (done.code, done.error) == (0, "")
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("plan", "data", "loss", "model", "training", "memory", "Nothing"),
    ]
    assert "stages of 1, 1 workers; 2 in all" in lines[0]
    assert "minibatches of 4 an epoch" in lines[1]
    assert "clip_norm is of each stage" in lines[4]
    assert _names(folder) == {"plan.json", "run.yaml"}


@pytest.mark.parametrize(
    ("old", "new", "words", "told"),
    [
        ("lr: 0.1", "lrate: 0.1", (), "lrate"),
        ("small_models:classes", "small_models:nosuch", (), "has no 'nosuch'"),
        ("batch_size: 4", "batch_size: 4000", (), "do not fill a batch of 4000"),
        ("clip_norm: 1", "loss: nosuch", (), "torch.nn.functional has no such function"),
        ("small_models:Noisy", "small_models:Chain", (), ""),
        ("batch_size: 4", "batch_size: 4", ("--resume",), "leave --resume out"),
    ],
)
def test_what_would_stop_a_run_is_told_in_one_line(
    folder: Path, old: str, new: str, words: tuple[str, ...], told: str
) -> None:
    (folder / "run.yaml").write_text(CONFIG.replace(old, new))
    asked = ["pd-train", "plan.json", "--config", "run.yaml", "--dry-run", *words]
    done = typed(folder, asked, VARIABLES)
    assert done.code == 2
    assert done.error.startswith("pd-train: ")
    assert len(done.error.splitlines()) == 1
    assert told in done.error
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    assert _names(folder) == {"plan.json", "run.yaml"}

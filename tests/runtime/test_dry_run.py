"""`pd-train --dry-run`: what would stop a run is found without one, and nothing is left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import small_models
from commands import typed

VARIABLES = {"PYTHONPATH": str(Path(small_models.__file__).parent)}


@pytest.fixture(autouse=True)
def clipped(folder: Path) -> None:
    with (folder / "run.yaml").open("a") as config:
        config.write("clip_norm: 1\n")


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


def test_of_several_ranks_one_tries(folder: Path) -> None:
    second = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    second |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    asked = ["pd-train", "plan.json", "--config", "run.yaml", "--dry-run"]
    done = typed(folder, asked, VARIABLES | second)
    assert (done.code, done.out, done.error) == (0, "", "")


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
    config = (folder / "run.yaml").read_text()
    (folder / "run.yaml").write_text(config.replace(old, new))
    asked = ["pd-train", "plan.json", "--config", "run.yaml", "--dry-run", *words]
    done = typed(folder, asked, VARIABLES)
    assert done.code == 2
    assert done.error.startswith("pd-train: ")
    assert len(done.error.splitlines()) == 1
    assert told in done.error
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    assert _names(folder) == {"plan.json", "run.yaml"}

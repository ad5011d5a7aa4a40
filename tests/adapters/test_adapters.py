"""The examples of docs/how-to/own-loop.md: on two ranks they lose what they lose on one."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import pipedream

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, str(Path(__file__).with_name("run_example.py"))]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MOST_CHANGED = 5
"""Lines that a user adds or changes, but for blank lines and the first, which says what it is."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "docs/examples", tmp_path, dirs_exist_ok=True)
    return tmp_path


def run(folder: Path, command: list[str], script: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [*command, script]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


def changed(folder: Path, plain: str, pipeline: str) -> int:
    both = ((folder / name).read_text().splitlines()[1:] for name in (plain, pipeline))
    return sum(line[:2] == "+ " and line.strip() != "+" for line in difflib.ndiff(*both))


def compare(folder: Path, plain: str, pipeline: str) -> None:
    """Runs both, and compares the losses that they write."""
    losses = []
    for command, script in ((RUN, plain), ([*TWO, *RUN[1:]], pipeline)):
        run(folder, command, script)
        losses.append(json.loads((folder / "losses.json").read_text()))
        (folder / "losses.json").unlink()
    assert len(losses[0]) >= 10
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert changed(folder, plain, pipeline) <= MOST_CHANGED


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(500)  # a minute on an idle machine
def test_a_causal_language_model_with_transformers_and_accelerate(folder: Path) -> None:
    """Examples of different lengths: the loss is a mean over tokens."""
    run(folder, RUN, "plan.py")
    compare(folder, "trainer.py", "trainer_pipeline.py")
    compare(folder, "accelerate_loop.py", "accelerate_pipeline.py")


@pytest.mark.thorough
@pytest.mark.slow
def test_a_lightning_module(folder: Path) -> None:
    layers = [nn.Linear(a, b) for a, b in pairwise([8, 32, 32, 32, 3])]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
    profiled = pipedream.profile(model, torch.randn(16, 8), repeats=3)
    plan = pipedream.optimize(profiled, 2, "1GB/s", schedule="flush", straight=True)
    plan.write(folder / "plan")
    compare(folder, "lightning_module.py", "lightning_pipeline.py")

"""A part of the benchmark against plain loops: models that import nothing, in real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/bench/against_plain/against_plain.py"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_losses_and_gradients_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """A GRU, and batch norms between links that skip stages; a smaller last minibatch, and
    minibatches of one example.
    """
    ways = ("2", "2 zb of 1")
    chosen = ["--models", "gru unet", "--precisions", "float64 bfloat16", "--ways", "|".join(ways)]
    command = [sys.executable, str(SCRIPT), "-o", str(tmp_path), *chosen]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8 within bounds" in done.stdout, done.stdout

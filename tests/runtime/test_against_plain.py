"""A part of the benchmark against plain loops: models that import nothing, in real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/bench/against_plain/against_plain.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("precision", "ways"), [("float64", "2,1|2 zb of 1"), ("bfloat16", "2|2 zb of 1")]
)
def test_losses_and_gradients_are_those_of_a_plain_loop(
    tmp_path: Path, precision: str, ways: str
) -> None:
    """A GRU, batch norms between links that skip stages, and attention; a smaller last minibatch,
    and minibatches of one example.
    """
    chosen = ["--models", "gru unet encoder", "--precisions", precision, "--ways", ways]
    command = [sys.executable, str(SCRIPT), "-o", str(tmp_path), *chosen]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 of 6 within bounds" in done.stdout, done.stdout

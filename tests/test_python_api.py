"""What README's commands do, from Python."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import small_models
import torch
from torch.nn import functional as F

import pipedream
from pipedream.command_line import words


def test_importing_it_takes_no_torch() -> None:
    code = "import sys, pipedream; print('torch' in sys.modules, *dir(pipedream))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", *sorted(pipedream.__all__)]
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        pipedream.optimise  # noqa: B018


def test_keywords_are_options() -> None:
    asked = {"save_every": 4, "trace": True, "keep": None, "machines": (4, 2), "resume": False}
    assert list(words(asked)) == ["--save-every", "4", "--trace", "--machines", "4,2"]


@pytest.mark.slow
def test_from_a_model_to_a_trained_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(small_models.__file__).parent))
    threads, collector = torch.get_num_threads(), gc.get_threshold()
    profiled = pipedream.profile(
        small_models.Noisy(),
        torch.randn(4, 6),
        loss=lambda output: F.cross_entropy(output, torch.zeros(4, dtype=torch.long)),
        repeats=3,
        warmup=1,
    )
    assert profiled.layers["op"].tolist()[-1] == "Linear"
    assert "Linear" in profiled._repr_html_()
    planned = pipedream.optimize(profiled, machines=2, bandwidth="1GB/s", straight=True)
    assert planned.plan.replicas == (1, 1)
    assert planned.plan.batch_size == 4
    assert "stage" in planned.report
    assert "<svg" in planned._repr_html_()
    assert (planned.write("plan") / "plan.json").exists()
    config = {
        "format": "pipedream-run/1",
        "model": {"source": "small_models:Noisy"},
        "data": {"source": "small_models:classes"},
        "batch_size": 4,
    }
    run = pipedream.train(planned, config, "run", epochs=2, save_every=8)
    assert len(run.metrics) == 30
    assert run.summary["final_loss"] == pytest.approx(run.metrics["loss"].iloc[-1])
    assert "final_loss" in run._repr_html_()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan", "run"]
    assert (torch.get_num_threads(), gc.get_threshold()) == (threads, collector)
    with pytest.raises(pipedream.UserError, match="-o run: there are checkpoints"):
        pipedream.train(planned, config, "run")
    with pytest.raises(pipedream.UserError, match="--bandwidth"):
        pipedream.optimize(profiled, machines=2, bandwidth="10")

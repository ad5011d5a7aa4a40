"""A run of pd-train with one worker, beside the same on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

from gpu_check.check import Measured, Setting
from gpu_check.measures.tools import ONE_WORKER, folder_of, make_plan, train


def loss_difference(setting: Setting) -> Measured:
    """Returns by what share the losses differ at most."""
    plan = make_plan(folder_of(setting, "perceptron"), "plan", *ONE_WORKER)
    gpu = _losses(train(setting, plan, "run"))
    cpu = _losses(train(setting, plan, "run-cpu", device="cpu"))
    worst = max(abs(one - other) / other for one, other in zip(gpu, cpu, strict=True))
    return Measured(worst, f"{len(cpu)} minibatches")


def _losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [float(json.loads(line)["loss"]) for line in lines]

"""What runs on meshes have learnt, and that it is what the same stages learn without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sharded_runs import Case, alone, train_cases
from torch import Tensor

from pipedream.runtime.checkpoint.files import load_all


def assert_alike(folder: Path, model: str, cases: list[Case], tolerance: float = 1e-12) -> None:
    """All cases, which differ in their meshes alone, learn what the first does without."""
    reference = alone(cases[0])
    train_cases(folder, model, [reference, *cases])
    for case in cases:
        assert_equal(folder / case.name, folder / reference.name, tolerance)


def assert_equal(run: Path, other: Path, tolerance: float = 1e-12) -> None:
    """The runs in both folders have learnt the same."""
    learnt, expected = (load_all(each / "checkpoints/latest") for each in (run, other))
    assert learnt.keys() == expected.keys()
    for name, tensor in expected.items():
        largest = max(1.0, float(tensor.double().abs().max()))
        torch.testing.assert_close(
            learnt[name] / largest, tensor / largest, rtol=tolerance, atol=tolerance
        )
    assert _losses(run) == pytest.approx(_losses(other), rel=tolerance)
    assert _held_out(run) == pytest.approx(_held_out(other), rel=tolerance)


def checkpoint(folder: Path, case: Case) -> dict[str, Tensor]:
    return load_all(folder / case.name / "checkpoints/latest")


def metrics(folder: Path, case: Case) -> list[float]:
    return _losses(folder / case.name)


def held_out(folder: Path, case: Case) -> list[float]:
    return _held_out(folder / case.name)


def _losses(run: Path) -> list[float]:
    return _column(run / "metrics.jsonl", "loss")


def _held_out(run: Path) -> list[float]:
    path = run / "held_out.jsonl"
    return _column(path, "held_out_loss") if path.exists() else []


def _column(path: Path, name: str) -> list[float]:
    return [float(json.loads(line)[name]) for line in path.read_text().splitlines()]

"""The serial reference for tests, and a small run of two workers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import small_models
import torch
from plans import cut, make_plan

from pipedream.capture.export import capture
from pipedream.graph.plan import write_plan

CONFIG = """\
format: pipedream-run/1
model: {source: "small_models:Noisy"}
data: {source: "small_models:classes"}
optimizer: {name: SGD, args: {lr: 0.1, momentum: 0.9}}
batch_size: 4
epochs: 3
"""


@pytest.fixture(scope="session")
def serial() -> ModuleType:
    """The module tests/runtime/serial.py."""
    path = Path(__file__).with_name("serial.py")
    spec = importlib.util.spec_from_file_location("serial_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plan for two workers and a run config."""
    graph = capture(small_models.Noisy(), (torch.randn(4, 6),)).graph
    write_plan(make_plan(graph, cut(graph, 2), (1, 1)), tmp_path / "plan.json")
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path

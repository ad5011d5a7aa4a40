"""The factories that ship in configs/, imported as the tools import them: by bare module name."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def digits_cnn(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CONFIGS))
    return importlib.import_module("digits_cnn")


@pytest.fixture
def topics_gpt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CONFIGS))
    return importlib.import_module("topics_gpt")


@pytest.fixture
def nasnet_a(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CONFIGS))
    return importlib.import_module("nasnet_a")


@pytest.fixture
def gnmt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CONFIGS))
    return importlib.import_module("gnmt")

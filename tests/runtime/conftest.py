"""The serial reference for tests: `serial` is the module tests/runtime/serial.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def serial() -> ModuleType:
    path = Path(__file__).with_name("serial.py")
    spec = importlib.util.spec_from_file_location("serial_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

"""The benchmarks, which take too long to be run here: each can at least be started."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from processes import run_processes

FOLDER = Path(__file__).parents[1] / "scripts" / "bench"


def import_all(rank: int, processes: int, folder: str, modules: list[str]) -> None:
    sys.path.insert(0, folder)
    for module in modules:
        importlib.import_module(module)


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.py"))


FOLDERS = [FOLDER, *sorted(each for each in FOLDER.iterdir() if names(each))]


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=[each.name for each in FOLDERS])
def test_every_benchmark_finds_what_it_imports(folder: Path) -> None:
    """Four of them did not, after files were renamed."""
    run_processes(import_all, 1, str(folder), names(folder))


def time_corrections(rank: int, processes: int) -> None:
    sys.path.insert(0, str(FOLDER / "learning"))
    overhead, methods = map(importlib.import_module, ("overhead", "methods"))
    sys.path.insert(0, str(methods.CONFIGS))
    took = overhead.seconds(["stashing AdamW", "stashing Muon"], 4, 64, 2)
    assert all(seconds > 0 for seconds in took.values())


@pytest.mark.slow
def test_corrections_of_late_gradients_are_timed() -> None:
    """They were not: how a model is told to learn had changed."""
    run_processes(time_corrections, 1)


def test_no_benchmark_hides_a_module_of_python() -> None:
    """Their folder comes first where modules are looked for: torch needs cProfile, which imports
    `profile`, and numba has a look at `coverage`.
    """
    known = sys.stdlib_module_names | {"coverage"}
    assert not known & {*names(FOLDER), *names(FOLDER / "emulated")}

"""The benchmarks, which take too long to be run here: each can at least be started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "scripts" / "bench"

IMPORTS = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.py"))


FOLDERS = [
    FOLDER,
    *(
        FOLDER / name
        for name in ("against_plain", "architectures", "emulated", "faults", "meshes", "orders")
    ),
]


@pytest.mark.parametrize("folder", FOLDERS, ids=[each.name for each in FOLDERS])
def test_every_benchmark_finds_what_it_imports(folder: Path) -> None:
    """Four of them did not, after files were renamed."""
    command = [sys.executable, "-c", IMPORTS, str(folder), *names(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_benchmark_hides_a_module_of_python() -> None:
    """Their folder comes first where modules are looked for: torch needs cProfile, which imports
    `profile`, and numba has a look at `coverage`.
    """
    known = sys.stdlib_module_names | {"coverage"}
    assert not known & {*names(FOLDER), *names(FOLDER / "emulated")}

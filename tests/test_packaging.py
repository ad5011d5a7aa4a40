"""What an installed pipedream promises: its commands answer at once, planning needs no torch."""

from __future__ import annotations

import configparser
import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("graph", "sharding", "capture", "schedule", "comm", "profiler", "optimizer", "runtime")
TOOLS = ("pd-profile", "pd-optimize", "pd-train")

WITHOUT_TORCH = """
import importlib, pkgutil, sys
import pipedream.graph, pipedream.optimizer, pipedream.schedule
for package in (pipedream.graph, pipedream.optimizer, pipedream.schedule):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
import pipedream.profiler.cli, pipedream.runtime.cli
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers"}))
"""


@pytest.mark.slow
def test_planning_and_the_schedule_import_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_help_answers_at_once(tool: str) -> None:
    """By its seconds of a core: on a busy machine it waits for one, for seconds at times."""
    command = [Path(sys.executable).with_name(tool), "--help"]
    seconds = []
    for _ in range(3):
        before = os.times()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        now = os.times()
        seconds.append(now.children_user + now.children_system)
        seconds[-1] -= before.children_user + before.children_system
    assert tool in done.stdout
    assert min(seconds) < 0.5


def test_the_metadata_name_the_tools_and_the_licence() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts")
    ours = {script.name for script in scripts if script.value.startswith("pipedream.")}
    assert ours == set(TOOLS)
    metadata = importlib.metadata.metadata("pipedream")
    assert metadata["License-Expression"] == "MIT" or metadata["License"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_typed(package: str) -> None:
    files = importlib.import_module(f"pipedream.{package}").__path__
    assert (Path(next(iter(files))) / "py.typed").exists()


def test_every_folder_with_code_is_a_package_that_is_installed() -> None:
    root = Path(__file__).parents[1]
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg")
    listed = config["options"]["packages"].split()
    tops = ("api", *PACKAGES)
    folders = {path.parent for top in tops for path in (root / top).rglob("*.py")}
    parts = (folder.relative_to(root).parts for folder in folders)
    names = (part[1:] if part[0] == "api" else part for part in parts)  # api is pipedream itself
    assert sorted(".".join(("pipedream", *name)) for name in names) == listed


def test_no_folder_has_more_than_fourteen_files() -> None:
    root = Path(__file__).parents[1]
    for top in ("api", *PACKAGES, "tests", "scripts"):
        for folder in [root / top, *(path for path in (root / top).rglob("*") if path.is_dir())]:
            assert len(list(folder.glob("*.py"))) <= 14, folder


def test_what_is_left_out_has_markers_that_exist(pytestconfig: pytest.Config) -> None:
    """`--strict-markers` refuses any other, so a misspelled mark is an error."""
    markers = [line.split(":")[0] for line in pytestconfig.getini("markers")]
    assert {"slow", "thorough"} <= set(markers)
    script = (Path(__file__).parents[1] / "scripts/test.sh").read_text()
    assert '-m "not slow"' in script
    assert "PIPEDREAM_TESTS=all" in script

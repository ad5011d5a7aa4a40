"""The three tools on a model, by their commands, as users run them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from gpu_check.check import Setting, Skipped
from gpu_check.measures.models import configs

ONE_WORKER = ("--machines", "1", "--bandwidth", "100GB")
_PACKAGES = {"gpt2": ("transformers", "torchvision"), "resnet50": ("torchvision",)}
_PROFILER = "pipedream.profiler.cli"


def folder_of(setting: Setting, model: str) -> Path:
    """Returns the folder with run.yaml and a profile of the model, made by the first that asks.

    Raises Skipped if a package is missing.
    """
    missing = [each for each in _PACKAGES.get(model, ()) if find_spec(each) is None]
    if missing:
        raise Skipped(f"pip install {' '.join(missing)}")
    folder = setting.folder / "models" / model
    if not (folder / "graph.txt").exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = {"format": "pipedream-run/1", **configs(setting.small)[model]}
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        repeats = "2" if setting.small else "10"
        device = ("--device", setting.device)
        call(_PROFILER, folder / "run.yaml", "-o", folder, *device, "--repeats", repeats)
    return folder


def make_plan(folder: Path, name: str, *options: str) -> Path:
    """Plans the model for the cluster that the options describe; returns plan.json."""
    config = yaml.safe_load((folder / "run.yaml").read_text())
    optimizer = "adam" if config["optimizer"]["name"] == "AdamW" else "momentum"
    given = ("--straight", "--optimizer", optimizer, *options)
    call("pipedream.optimizer.cli.command", folder / "graph.txt", *given, "-o", folder / name)
    return folder / name / "plan.json"


def train(setting: Setting, plan: Path, run: str, *options: str, device: str = "") -> Path:
    """Trains an epoch; returns the folder of the run."""
    folder = plan.parents[1]
    given = ("--config", folder / "run.yaml", "--device", device or setting.device)
    call("pipedream.runtime.cli", plan, *given, "-o", folder / run, *options)
    return folder / run


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def measure_network(setting: Setting) -> dict[str, Any]:
    """Returns the cluster that two ranks on this machine's GPU are, as pd-profile measures it."""
    folder = setting.folder / "network"
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    options = ("--network", "--device", setting.device, "--largest", "4MB", "-o", folder)
    call(*torchrun, _PROFILER, *options)
    cluster: dict[str, Any] = yaml.safe_load((folder / "cluster.yaml").read_text())
    return cluster


def call(module: str, *words: object) -> None:
    """Runs a module's command. Raises CalledProcessError; its own words are in the log."""
    command: Sequence[str] = [sys.executable, "-m", module, *map(str, words)]
    subprocess.run(command, check=True)

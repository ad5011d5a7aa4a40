"""Does the simulation learn as pd-train does? `python scripts/bench/learning/real.py [METHOD]...`

Trains each method by pd-train on as many processes as stages, with the plan that has one block in
each, and in one process by `late_model.py`, and compares the losses of all updates. Under 2bw an
update has as many microbatches as stages, in both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

import torch
import yaml
from late_model import LateModel
from methods import BATCH, CONFIGS, METHODS, UPDATES, Method, config_of

from pipedream.graph.run_config import RunConfig

RATES = (2.5e-3, 6.3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("-o", "--output", type=Path, default=None)
    asked = parser.parse_args()
    folder = asked.output or Path(tempfile.mkdtemp(prefix="learning-"))
    sys.path.insert(0, str(CONFIGS))
    torch.set_num_threads(1)
    paths = (str(CONFIGS), os.environ.get("PYTHONPATH"))
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for name in asked.methods or METHODS:
        theirs = real(name, asked.stages, folder)
        method = METHODS[name]
        model = LateModel(configured(method, asked.stages), method.schedule, asked.stages)
        ours = model.train()
        assert len(ours) == len(theirs) == UPDATES, (len(ours), len(theirs))
        same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        most = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        print(
            f"{name:24} {len(ours)} losses, {same} the same bit for bit, at most {most:.2g} apart;"
            f" the last {ours[-1]:.6f} and {theirs[-1]:.6f}",
            flush=True,
        )


def configured(method: Method, stages: int) -> RunConfig:
    config = config_of(method, stages, RATES[: method.groups], 0)
    if method.schedule != "2bw":
        return config
    divided = {"batch_size": BATCH // stages, "microbatches": stages}
    return config.model_copy(update=divided)


def real(name: str, stages: int, folder: Path) -> list[float]:
    """Returns the loss of each update of a run of pd-train, made unless it is there."""
    run, method = folder / name.replace(" ", "-"), METHODS[name]
    config = run.with_suffix(".yaml")
    if not (run / "summary.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        told = configured(method, stages).model_dump(mode="json", exclude_defaults=True)
        config.write_text(yaml.safe_dump(told))
        plan = folder / "plan" / "plan.json"
        if not plan.exists():
            call("pd-profile", config, "-o", folder / "profile", "--repeats", 3)
            cuts = ",".join(f"blocks.{stage}" for stage in range(1, stages))
            where = ("--machines", stages, "--bandwidth", "5GB", "--split", cuts)
            call("pd-optimize", folder / "profile/graph.txt", *where, "-o", plan.parent)
        schedule = ("--schedule", method.schedule)
        call("pd-train", plan, "--config", config, "-o", run, *schedule, "--no-evaluate")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    size = stages if method.schedule == "2bw" else 1
    return [fmean(losses[first : first + size]) for first in range(0, UPDATES * size, size)]


def call(program: str, *arguments: object) -> None:
    command = [Path(sys.executable).with_name(program), *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

"""Is a plan's predicted time what training takes? `python scripts/bench_prediction.py [MODEL]...`

The network between two processes is measured by pd-profile --network. Then, for each model and in
turns, pd-profile measures it, the cost model `measured` says what each of three plans for two
devices takes (the best pipeline, one that is cut in another place, two replicas), and pd-train runs
each for some minibatches. What is said and what is measured are neighbours in time: a machine that
is slower for a minute is slower in both. A line for each pair of model and plan, with the median of
its errors over the turns, then the median and the worst of these.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from bench_runtime import MODELS as THREE
from bench_runtime import STILL, call

from pipedream.graph.cluster_file import read_cluster
from pipedream.graph.plan import OptimizerName, Plan, write_plan
from pipedream.graph.text import read_graph
from pipedream.graph.upkeep import read_upkeep
from pipedream.optimizer.again import price
from pipedream.optimizer.cost import Measured
from pipedream.optimizer.hierarchy import Rules
from pipedream.optimizer.optimize import Request, given_plan, optimize

ROUNDS = 5
MINIBATCHES = 40
SECONDS = 8
OPTIMIZERS: dict[str, OptimizerName] = {"SGD": "momentum", "AdamW": "adam"}

MODELS: dict[str, dict[str, Any]] = {
    **THREE,
    "resnet": {
        "model": {"source": "torchvision:resnet18", "args": {"num_classes": 10}},
        "data": {"source": "bench_models:vgg_data"},
        "loss": "cross_entropy",
        "optimizer": {"name": "SGD", "args": {"lr": STILL, "momentum": 0.9}},
        "batch_size": 32,
    },
}


def prepare(name: str, folder: Path) -> Path:
    """The run config, for an epoch of so many minibatches."""
    run = {"format": "pipedream-run/1", **MODELS[name]}
    data: dict[str, Any] = dict(run["data"])
    data["args"] = {**data.get("args", {}), "examples": MINIBATCHES * run["batch_size"]}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**run, "data": data}))
    return path


def request(name: str, profile: Path, cluster: Path) -> Request:
    optimizer = OPTIMIZERS[MODELS[name]["optimizer"]["name"]]
    upkeep = read_upkeep(profile / "profile.json")
    return Request(
        read_graph(profile / "graph.txt"),
        read_cluster(cluster),
        Measured(),
        rules=Rules(straight=True),
        optimizer=optimizer,
        update_rate=upkeep.update_rates[optimizer],
        upkeep=upkeep,
    )


def plans(asked: Request) -> dict[str, Plan]:
    """Pipelines of two stages, the best and one with another cut, and two replicas."""
    planning = asked.planning
    before = np.cumsum(planning.compute_seconds) / planning.compute_seconds.sum()
    place = int(np.abs(before - 0.4).argmin()) + 1
    return {
        "best": optimize(asked).plan,
        "two fifths": given_plan(asked, planning, [place, len(planning)], [1, 1]).plan,
        "replicas": given_plan(asked, planning, [len(planning)], [2]).plan,
    }


def train(plan: Plan, config: Path, folder: Path) -> float:
    """Seconds per minibatch as pd-train tells it."""
    folder.mkdir(parents=True)
    write_plan(plan, folder / "plan.json")
    run = folder / "run"
    call("pd-train", folder / "plan.json", "--config", config, "-o", run, "--no-evaluate")
    summary = json.loads((run / "summary.json").read_text())
    return float(summary["seconds_per_minibatch"])


def main() -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.environ["OMP_NUM_THREADS"] = "1"
    names = sys.argv[1:] or list(MODELS)
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    torchrun = Path(sys.executable).with_name("torchrun")
    network = ["--nproc-per-node", "2", "--no-python", "pd-profile", "--network", "-o", folder]
    subprocess.run([torchrun, *network], check=True, stdout=subprocess.DEVNULL)
    rows = [row for name in names for row in compare(name, folder)]
    frame = pd.DataFrame(rows)
    print(frame.to_string(index=False, float_format="%.4f"))
    errors = frame.error.abs()
    print(f"{len(frame)} pairs: median error {errors.median():.1%}, worst {errors.max():.1%}")


def compare(name: str, folder: Path) -> list[dict[str, Any]]:
    """A row for each plan of the first profile: medians over the rounds."""
    config = prepare(name, folder)
    found: dict[str, Plan] = {}
    predicted: dict[str, list[float]] = defaultdict(list)
    measured: dict[str, list[float]] = defaultdict(list)
    for turn in range(ROUNDS):
        profile = folder / name / f"profile-{turn}"
        call("pd-profile", config, "-o", profile, "--seconds", SECONDS, "--workers", 2)
        asked = request(name, profile, folder / "cluster.yaml")
        found = found or plans(asked)
        for which, plan in found.items():
            predicted[which].append(price(plan, asked).per_minibatch)
            measured[which].append(train(plan, config, folder / name / f"{which}-{turn}"))
    rows = []
    for which in found:
        pairs = list(zip(predicted[which], measured[which], strict=True))
        rows.append(
            {
                "model": name,
                "plan": which,
                "predicted": statistics.median(predicted[which]),
                "measured": statistics.median(measured[which]),
                "least": min(measured[which]),
                "most": max(measured[which]),
                "error": statistics.median(said / took - 1 for said, took in pairs),
            }
        )
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()})
    return rows


if __name__ == "__main__":
    main()

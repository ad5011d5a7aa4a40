"""Is a plan's predicted time what training takes? `python scripts/bench_prediction.py [MODEL]...`

Each model is profiled by pd-profile and the network between two processes by pd-profile --network;
pd-optimize plans for two devices under the cost model `measured`, and beside its best pipeline
others are made: one that is cut in another place, and two replicas. pd-train runs each for some
minibatches, all of them in turns, several times over, and the median time per minibatch stands
beside what the plan said. A line for each pair of model and plan, then median and worst error.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from bench_runtime import MODELS as THREE
from bench_runtime import STILL, call

from pipedream.graph.cluster_file import read_cluster
from pipedream.graph.plan import Plan, read_plan, write_plan
from pipedream.graph.text import read_graph
from pipedream.graph.upkeep import read_upkeep
from pipedream.optimizer.cost import Measured
from pipedream.optimizer.optimize import Request, given_plan

ROUNDS = 3
MINIBATCHES = 60
OPTIMIZERS = {"SGD": "momentum", "AdamW": "adam"}

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


def plans(name: str, folder: Path, cluster: Path) -> dict[str, Plan]:
    profile = folder / name
    optimizer = OPTIMIZERS[MODELS[name]["optimizer"]["name"]]
    graph, upkeep = read_graph(profile / "graph.txt"), read_upkeep(profile / "profile.json")
    call(
        "pd-optimize", profile / "graph.txt", "--cluster", cluster, "--straight",
        "--optimizer", optimizer, "-o", profile / "plan",
    )  # fmt: skip
    request = Request(
        graph,
        read_cluster(cluster),
        Measured(),
        optimizer=optimizer,  # type: ignore[arg-type]
        update_rate=upkeep.update_rates[optimizer],
        upkeep=upkeep,
    )
    planning = request.planning
    before = np.cumsum(planning.compute_seconds) / planning.compute_seconds.sum()
    place = int(np.abs(before - 0.4).argmin()) + 1
    return {
        "best": read_plan(profile / "plan/plan.json"),
        "two fifths": given_plan(request, planning, [place, len(planning)], [1, 1]).plan,
        "replicas": given_plan(request, planning, [len(planning)], [2]).plan,
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
    rows = []
    for name in names:
        config = prepare(name, folder)
        call("pd-profile", config, "-o", folder / name)
        found = plans(name, folder, folder / "cluster.yaml")
        took: dict[str, list[float]] = {which: [] for which in found}
        for turn in range(ROUNDS):
            for which, plan in found.items():
                run = folder / name / f"{which}-{turn}"
                took[which].append(train(plan, config, run))
        for which, plan in found.items():
            predicted, measured = plan.predicted, statistics.median(took[which])
            rows.append(
                {
                    "model": name,
                    "plan": which,
                    "cuts": len(plan.stages),
                    "predicted": predicted.seconds_per_minibatch,
                    "measured": measured,
                    "least": min(took[which]),
                    "most": max(took[which]),
                    "error": predicted.seconds_per_minibatch / measured - 1,
                }
            )
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()})
    frame = pd.DataFrame(rows)
    print(frame.to_string(index=False, float_format="%.4f"))
    errors = frame.error.abs()
    print(f"{len(frame)} pairs: median error {errors.median():.1%}, worst {errors.max():.1%}")


if __name__ == "__main__":
    main()

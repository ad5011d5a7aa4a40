"""Is a plan's predicted time what training takes? `python scripts/bench/prediction.py [MODEL]...`

The network between two processes is measured by pd-profile --network. Then, for each model,
pd-profile measures it, and three plans for two devices are made (the best pipeline, one that is cut
in another place, two replicas). What counts is measured after that: pd-profile once more, and
pd-train of each plan, take turns of two seconds (turns.py) until each has had about `SECONDS` of
passes. The cost model `measured` says from that profile what a minibatch of each plan takes. A line
for each pair of model and plan, then the median and the worst of the errors.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from bench_runtime import MODELS as THREE
from bench_runtime import STILL, call
from turns import take_turns

from pipedream.graph.choices import OptimizerName
from pipedream.graph.cluster_file import read_cluster
from pipedream.graph.model import read_graph
from pipedream.graph.plan import Plan, write_plan
from pipedream.graph.profile import read_profile
from pipedream.optimizer.cost.models import MeasuredCost
from pipedream.optimizer.cost.price_plan import price_plan
from pipedream.optimizer.search.outcome import given_plan
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.search.stages import Rules
from pipedream.runtime.report.recording import read_trace
from pipedream.schedule.action import Kind

SECONDS = 40
FILLING = 4
PASSES = 2.2
"""How many passes of the model a repeat of pd-profile takes, about: it should end with the runs, or
what slows the machine after it slows them alone."""
STOPPED = 3.0
"""What took so many times the median was stopped meanwhile."""
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


def prepare(name: str, path: Path, minibatches: int) -> Path:
    """The run config, for an epoch of so many minibatches."""
    run = {"format": "pipedream-run/1", **MODELS[name]}
    data: dict[str, Any] = dict(run["data"])
    data["args"] = {**data.get("args", {}), "examples": minibatches * run["batch_size"]}
    path.write_text(yaml.safe_dump({**run, "data": data}))
    return path


def request(name: str, profile: Path, cluster: Path) -> Request:
    optimizer = OPTIMIZERS[MODELS[name]["optimizer"]["name"]]
    overheads = read_profile(profile / "profile.json").training_overheads
    return Request(
        read_graph(profile / "graph.txt"),
        read_cluster(cluster),
        MeasuredCost(),
        rules=Rules(straight=True),
        optimizer=optimizer,
        update_rate=overheads.update_rates[optimizer],
        overheads=overheads,
    )


def plans(asked: Request) -> dict[str, Plan]:
    """Pipelines of two stages, the best and one with another cut, and two replicas."""
    planning = asked.planning
    before = np.cumsum(planning.compute_seconds) / planning.compute_seconds.sum()
    rank_info = int(np.abs(before - 0.4).argmin()) + 1
    return {
        "best": optimize(asked).plan,
        "two fifths": given_plan(asked, planning, [rank_info, len(planning)], [1, 1]).plan,
        "replicas": given_plan(asked, planning, [len(planning)], [2]).plan,
    }


def measured(run: Path, plan: Plan) -> float:
    """Seconds per minibatch: the mean over all that follow some to fill the pipeline.

    Of the time from one backward pass of rank 0 to its next, but where the program was stopped.
    """
    events = read_trace(run / "timeline.csv")[0]
    ends = [event.end for event in events if event.action.kind == Kind.BACKWARD][FILLING:]
    spans = [late - early for early, late in pairwise(ends)]
    most = STOPPED * statistics.median(spans)
    return statistics.fmean(span for span in spans if span < most) / plan.replicas[0]


def main() -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.environ["OMP_NUM_THREADS"] = "1"
    names = sys.argv[1:] or list(MODELS)
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    network = ["--nproc-per-node", "2", "--no-python", "pd-profile", "--network", "-o", folder]
    subprocess.run([program("torchrun"), *network], check=True, stdout=subprocess.DEVNULL)
    rows = [row for name in names for row in compare(name, folder)]
    frame = pd.DataFrame(rows)
    print(frame.to_string(index=False, float_format="%.4f"))
    errors = frame.error.abs()
    print(f"{len(frame)} pairs: median error {errors.median():.1%}, worst {errors.max():.1%}")


def compare(name: str, folder: Path) -> list[dict[str, Any]]:
    """A row for each plan."""
    cluster, here = folder / "cluster.yaml", folder / name
    here.mkdir()
    first = prepare(name, here / "first.yaml", 16)
    call("pd-profile", first, "-o", here / "first", "--seconds", 4, "--workers", 2)
    asked = request(name, here / "first", cluster)
    chosen = plans(asked)
    repeats = int(SECONDS / PASSES / asked.planning.compute_seconds.sum())
    # The profile has the data that the runs have: more than caches hold take longer to read.
    minibatches = int(SECONDS / price_plan(chosen["best"], asked).per_minibatch)
    config = prepare(name, here / "run.yaml", minibatches)
    commands = [profiling(config, here / "profile", repeats)]
    for which, plan in chosen.items():
        (here / which).mkdir()
        write_plan(plan, here / which / "plan.json")
        commands.append(training(here / which, config))
    take_turns(commands)
    asked = request(name, here / "profile", cluster)
    rows = []
    for which, plan in chosen.items():
        said, took = price_plan(plan, asked).expected, measured(here / which / "run", plan)
        assert said is not None
        row = {"model": name, "plan": which, "predicted": said, "measured": took}
        rows.append({**row, "error": said / took - 1})
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()})
    return rows


def profiling(config: Path, folder: Path, repeats: int) -> list[object]:
    return [program("pd-profile"), config, "-o", folder, "--repeats", repeats, "--workers", 2]


def training(folder: Path, config: Path) -> list[object]:
    words = [folder / "plan.json", "--config", config, "-o", folder / "run", "--no-evaluate"]
    return [program("pd-train"), *words]


def program(name: str) -> Path:
    return Path(sys.executable).with_name(name)


if __name__ == "__main__":
    main()

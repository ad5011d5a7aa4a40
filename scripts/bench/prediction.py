"""Is the time that pd-optimize expects what training takes? On two processes of this machine.

    python scripts/bench/prediction.py [MODEL]...

As a user does it, one command after the other: for each model pd-profile MODEL --network between
two workers; for each plan pd-profile --workers 2, pd-train. The plans: the one of pd-optimize,
pipelines with two other cuts, and two replicas. A line for each pair of model and plan, then the
median and the worst of the errors, and how many are above and below.

A machine that is shared may be a fifth slower some minutes later. So each run is profiled again
after it, and `drift` is by how much all passes of the second profile took longer than those of the
first; `between` is the error of the mean of what both expect.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from efficiency import MODELS as THREE
from efficiency import STILL, call

from pipedream.graph.choices import OptimizerName
from pipedream.graph.cluster import read_cluster
from pipedream.graph.model import read_graph
from pipedream.graph.plan import Plan, write_plan
from pipedream.graph.profile import read_profile
from pipedream.optimizer.choose.chooser import best_plan
from pipedream.optimizer.choose.division import Division, in_order
from pipedream.optimizer.choose.expected import expected
from pipedream.optimizer.choose.placed_trials import PlacedTrials
from pipedream.optimizer.cost.models import NetworkCost
from pipedream.optimizer.search.request import Request

SECONDS = 20
"""About how long a run trains."""
PROFILE_SECONDS = 20
OPTIMIZERS: dict[str, OptimizerName] = {"SGD": "momentum", "AdamW": "adam"}

MODELS: dict[str, dict[str, Any]] = {
    **THREE,
    "resnet": {
        "model": {"source": "torchvision:resnet18", "args": {"num_classes": 10}},
        "data": {"source": "models:vgg_data"},
        "loss": "cross_entropy",
        "optimizer": {"name": "SGD", "args": {"lr": STILL, "momentum": 0.9}},
        "batch_size": 32,
    },
}


def main() -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    report([row for name in sys.argv[1:] or MODELS for row in compare(name, folder / name)])


def report(rows: Sequence[Mapping[str, Any]]) -> None:
    frame = pd.DataFrame(rows)
    print(frame.to_string(index=False, float_format="%.4f"))
    for column in ("error", "between"):
        errors = frame[column].abs()
        above = int((frame[column] > 0).sum())
        print(
            f"{column}: median {errors.median():.1%}, worst {errors.max():.1%}; expected more than"
            f" measured in {above}, less in {len(frame) - above} of {len(frame)}"
        )


def compare(name: str, folder: Path) -> list[dict[str, Any]]:
    """A row for each plan."""
    measure_network(name, folder)
    rows = []
    before = profiled(name, folder / "first", folder)
    for which, division in divisions(before).items():
        row, before = trained(name, which, planned(before, division), before, folder)
        rows.append(row)
    return rows


def measure_network(name: str, folder: Path) -> None:
    """Writes cluster.yaml into the folder, which it makes."""
    folder.mkdir()
    config = prepare(name, folder / "network.yaml", 16)
    network = ["pd-profile", config, "--network", "-o", folder]
    torchrun = [program("torchrun"), "--nproc-per-node", "2", "--no-python"]
    subprocess.run([*torchrun, *network], check=True, stdout=subprocess.DEVNULL)


def trained(
    name: str, which: str, plan: Plan, before: Request, folder: Path
) -> tuple[dict[str, Any], Request]:
    """A row, which is printed, and the request for a profile made after the run."""
    (folder / which).mkdir()
    write_plan(plan, folder / which / "plan.json")
    first = seconds_in_a_run(plan, before)
    config = prepare(name, folder / which / "run.yaml", int(SECONDS / first))
    words = ["--config", config, "-o", folder / which / "run", "--no-evaluate"]
    call("pd-train", folder / which / "plan.json", *words)
    summary = json.loads((folder / which / "run" / "summary.json").read_text())
    took = summary["seconds_per_minibatch"]
    after = profiled(name, folder / which / "profile", folder)
    row = {
        "model": name,
        "plan": which,
        "replicas": plan.replicas,
        "expected": first,
        "measured": took,
        "error": first / took - 1,
        "drift": passes(after) / passes(before) - 1,
        "between": (first + seconds_in_a_run(plan, after)) / 2 / took - 1,
    }
    print(row, flush=True)
    return row, after


def profiled(name: str, folder: Path, network: Path) -> Request:
    """The request for a profile made now."""
    config = prepare(name, folder.with_suffix(".yaml"), 16)
    call("pd-profile", config, "-o", folder, "--seconds", PROFILE_SECONDS, "--workers", 2)
    return request(name, folder, network)


def passes(asked: Request) -> float:
    return float(asked.planning.compute_seconds.sum())


def prepare(name: str, path: Path, minibatches: int) -> Path:
    """The run config, for an epoch of so many minibatches."""
    run = {"format": "pipedream-run/1", **MODELS[name]}
    data: dict[str, Any] = dict(run["data"])
    data["args"] = {**data.get("args", {}), "examples": minibatches * run["batch_size"]}
    path.write_text(yaml.safe_dump({**run, "data": data}))
    return path


def request(name: str, folder: Path, network: Path) -> Request:
    """As pd-optimize makes it of a profile and a cluster file."""
    optimizer = OPTIMIZERS[MODELS[name]["optimizer"]["name"]]
    profile = read_profile(folder / "profile.json")
    overheads = profile.training_overheads
    return Request(
        read_graph(folder / "graph.txt"),
        read_cluster(network / "cluster.yaml"),
        NetworkCost(),
        optimizer=optimizer,
        update_rate=overheads.update_rates[optimizer],
        in_place_rate=overheads.in_place_rates.get(optimizer),
        overheads=overheads,
        footprints=profile.footprints,
    )


def divisions(asked: Request) -> dict[str, Division]:
    """That of the chosen plan, two replicas, and pipelines of two stages with cuts at two fifths
    and at the half of the passes.
    """
    graph = asked.planning
    before = np.cumsum(graph.compute_seconds) / graph.compute_seconds.sum()
    every = (1 << len(graph)) - 1
    made = {"chosen": Division.of(best_plan(asked).plan, graph)}
    made["replicas"] = Division((every,), in_order([2]))
    for label, share in (("two fifths", 0.4), ("half", 0.5)):
        end = int(np.abs(before - share).argmin()) + 1
        made[label] = Division(((1 << end) - 1, every), in_order([1, 1]))
    return made


def planned(asked: Request, division: Division) -> Plan:
    trial = PlacedTrials(asked).settle(division)
    assert trial is not None
    return trial.plan


def seconds_in_a_run(plan: Plan, asked: Request) -> float:
    """Seconds per minibatch to be expected of it."""
    in_a_run = expected(plan, asked)
    assert in_a_run is not None
    return in_a_run.seconds


def program(name: str) -> Path:
    return Path(sys.executable).with_name(name)


if __name__ == "__main__":
    main()

"""Do nine of ten runs take what pd-optimize said? On two processes of this machine.

    python scripts/bench/pairs/pairs.py [--folder FOLDER] [MODEL]...

As a user does it, one command after the other, for each model of `paired_models`: pd-profile with
--workers 2, pd-optimize with --cluster auto, pd-train, and pd-profile again. A line for each: the
interval of the plan, what the run took, the error of the expected time, and `drift`, by how much
the passes of the second profile took longer. `both`: what pd-optimize says of the same plan when it
is given both profiles (--again). Then how many intervals hold, their median width and the median
error, and the relative deviation of the runs, of which `FLOOR` in optimizer/choose/interval.py is.

A pair takes about a minute and a half. What is in FOLDER already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from paired_models import MODELS

from pipedream.graph.cluster import write_cluster
from pipedream.graph.plan import Plan, read_plan
from pipedream.graph.profile import read_profile

SECONDS = 15
"""About how long a run trains."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    asked = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="pairs-"))
    rows = []
    for name in asked.models:
        rows.append(pair(name, folder / name.replace(" ", "-")))
        print(json.dumps(rows[-1]), flush=True)
    report(rows)
    print(f"in {folder}")


def pair(name: str, folder: Path) -> dict[str, Any]:
    """Makes a pair in its folder, as far as it is not there, and returns its row."""
    folder.mkdir(parents=True, exist_ok=True)
    config, before, plan = folder / "run.yaml", folder / "before", folder / "plan"
    if not (before / "profile.json").exists():
        write_config(name, config, 16)
        profile(config, before)
    if not (plan / "plan.json").exists():
        cluster = ("--cluster", "auto", "--workers", 2)
        call("pd-optimize", before / "graph.txt", *cluster, "-o", plan)
    run, after = folder / "run", folder / "after"
    if not (run / "summary.json").exists():
        minibatches = max(40, int(SECONDS / expected(read_plan(plan / "plan.json"))))
        write_config(name, config, minibatches)
        call("pd-train", plan / "plan.json", "--config", config, "-o", run, "--no-evaluate")
    if not (after / "profile.json").exists():
        profile(config, after)
    return row(name, folder)


def write_config(name: str, path: Path, minibatches: int) -> None:
    """Of a run of one epoch of so many minibatches, which learns nothing."""
    model = MODELS[name]
    count = minibatches * model.batch_size
    text = {
        "format": "pipedream-run/1",
        "model": {"source": "paired_models:make", "args": {"name": name}},
        "data": {"source": "paired_models:examples", "args": {"name": name, "count": count}},
        "loss": model.loss,
        "optimizer": {"name": "SGD", "args": {"lr": 1e-6, "momentum": 0.9}},
        "batch_size": model.batch_size,
        "epochs": 1,
    }
    path.write_text(yaml.safe_dump(text))


def profile(config: Path, folder: Path) -> None:
    call("pd-profile", config, "-o", folder, "--workers", 2)


def expected(plan: Plan) -> float:
    return plan.predicted.seconds_in_a_run


def row(name: str, folder: Path) -> dict[str, Any]:
    """What was said and what was measured, in seconds per minibatch."""
    summary = json.loads((folder / "run/summary.json").read_text())
    took = summary["seconds_per_minibatch"]
    before, after = (passes(folder / each) for each in ("before", "after"))
    plan = read_plan(folder / "plan/plan.json")
    both = again(folder, plan)
    return {
        "model": name,
        "stages": "+".join(map(str, plan.replicas)),
        "measured": took,
        **compared("", plan, took),
        **compared("both ", both, took),
        "drift": after / before - 1,
    }


def compared(which: str, plan: Plan, took: float) -> dict[str, Any]:
    said = plan.predicted.expected_interval
    least, most = (math.nan, math.nan) if said is None else said
    return {
        f"{which}least": least,
        f"{which}most": most,
        f"{which}error": expected(plan) / took - 1,
        f"{which}width": (most - least) / expected(plan),
        f"{which}holds": least <= took <= most,
    }


def again(folder: Path, plan: Plan) -> Plan:
    """The stages of the plan by both profiles, with the links that were measured for it."""
    cluster = folder / "cluster.yaml"
    write_cluster(plan.cluster, cluster)
    names = ",".join(stage.nodes[0] for stage in plan.stages[1:])
    split = ("--split", names) if names else ()
    asked = ("--cluster", cluster, "--schedule", plan.schedule, *split)
    replicas = ",".join(map(str, plan.replicas))
    call(
        *("pd-optimize", folder / "after/graph.txt", "--again", folder / "before/profile.json"),
        *(*asked, "--replicas", replicas, "-o", folder / "both"),
    )
    return read_plan(folder / "both/plan.json")


def passes(folder: Path) -> float:
    """Seconds of all passes."""
    totals = read_profile(folder / "profile.json").totals
    return totals.forward_seconds + totals.backward_seconds


def report(rows: Sequence[Mapping[str, Any]]) -> None:
    frame = pd.DataFrame(rows)
    print(frame.to_string(index=False, float_format="%.4f"))
    for which in ("", "both "):
        errors = frame[f"{which}error"]
        logs = [math.log1p(error) for error in errors]
        deviation = math.sqrt(sum(each**2 for each in logs) / len(logs))
        print(
            f"{which or 'one '}profile: {frame[f'{which}holds'].sum()} of {len(frame)} hold;"
            f" median width {frame[f'{which}width'].median():.1%}, median error"
            f" {errors.abs().median():.1%}, worst {errors.abs().max():.1%}, mean"
            f" {errors.mean():+.1%}; deviation {deviation:.1%}"
        )


def call(program: str, *arguments: object) -> None:
    command = [str(Path(sys.executable).with_name(program)), *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

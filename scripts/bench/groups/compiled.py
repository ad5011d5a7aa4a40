"""Is what pd-profile measures of compiled stages what training takes, and what does it gain?

    python scripts/bench/groups/compiled.py [MODEL]... [--stages 1]

As a user does it: for each model, not compiled and compiled, pd-profile RUN.YAML, pd-optimize for
so many workers in a row, pd-train. A line for each: expected and measured seconds of a minibatch,
the memory that passes save, and the last loss, which is to be the same.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import pandas as pd
import yaml

BENCH = Path(__file__).parents[1]
sys.path.insert(0, str(BENCH))

from efficiency import call  # noqa: E402
from prediction import MODELS  # noqa: E402

from pipedream.graph.plan import read_plan  # noqa: E402
from pipedream.graph.profile import read_profile  # noqa: E402

SECONDS = 15
"""About how long a run trains."""


@click.command()
@click.argument("names", nargs=-1)
@click.option("--stages", default=1, show_default=True)
@click.option("--backend", default="inductor", show_default=True)
def main(names: tuple[str, ...], stages: int, backend: str) -> None:
    os.environ["PYTHONPATH"], os.environ["OMP_NUM_THREADS"] = str(BENCH), "1"
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    rows = []
    for name in names or MODELS:
        minibatches = None
        for compiled in (None, backend):
            own = row(name, compiled, stages, folder / name / str(compiled), minibatches)
            minibatches = minibatches or int(SECONDS / own["expected"])
            rows.append(own)
            print(own, flush=True)
    frame = pd.DataFrame(rows)
    print(frame.to_string(index=False, float_format="%.4f"))
    errors = frame.error.abs()
    print(f"median {errors.median():.1%}, worst {errors.max():.1%}")


def row(
    name: str, backend: str | None, stages: int, folder: Path, minibatches: int | None
) -> dict[str, Any]:
    """`minibatches` of the run: by default as many as take some seconds."""
    folder.mkdir(parents=True)
    config = prepare(name, backend, folder, 16)
    call("pd-profile", config, "-o", folder / "profile", "--workers", stages)
    links = ("--machines", stages, "--bandwidth", "5GB", "--straight")
    call("pd-optimize", folder / "profile/graph.txt", *links, "-o", folder / "plan")
    plan = read_plan(folder / "plan/plan.json")
    profile = read_profile(folder / "profile/profile.json")
    expected = plan.predicted.expected_seconds_per_minibatch
    assert expected is not None
    config = prepare(name, backend, folder, minibatches or int(SECONDS / expected))
    call(
        *("pd-train", folder / "plan/plan.json", "--config", config, "-o", folder / "run"),
        "--no-evaluate",
    )
    summary = json.loads((folder / "run/summary.json").read_text())
    measured = summary["seconds_per_minibatch"]
    return {
        "model": name,
        "compiled": backend or "no",
        "expected": expected,
        "measured": measured,
        "error": expected / measured - 1,
        "saved": sum(node.saved_bytes or 0 for node in profile.nodes),
        "loss": summary["final_loss"],
    }


def prepare(name: str, backend: str | None, folder: Path, minibatches: int) -> Path:
    """The run config, for an epoch of so many minibatches."""
    run: dict[str, Any] = {"format": "pipedream-run/1", **MODELS[name]}
    data = {**run["data"]}
    data["args"] = {**data.get("args", {}), "examples": minibatches * run["batch_size"]}
    own = {**run, "data": data} | ({} if backend is None else {"compile": backend})
    path = folder / f"run-{minibatches}.yaml"
    path.write_text(yaml.safe_dump(own))
    return path


if __name__ == "__main__":
    main()

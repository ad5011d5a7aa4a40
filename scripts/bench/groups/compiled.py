"""Is what pd-profile measures of compiled stages what training takes, and what does it gain?

    python scripts/bench/groups/compiled.py [MODEL]... [--ways none,stage,groups] [--turns 1]

As a user does it: for each model pd-profile RUN.YAML --compile auto, and for each way pd-profile
with that, pd-optimize for so many workers in a row, pd-train. All ways are trained in turns. A line
for each: expected and measured seconds of a minibatch, the memory that passes save, the last loss,
which is to be the same; and which way auto takes, with the seconds that compiling takes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pandas as pd
import yaml

BENCH = Path(__file__).parents[1]
sys.path.insert(0, str(BENCH))

from efficiency import call  # noqa: E402
from prediction import MODELS  # noqa: E402

from pipedream.graph.plan import Plan, read_plan  # noqa: E402
from pipedream.graph.profile import read_profile  # noqa: E402

SECONDS = 15
"""About how long a run trains."""


IMAGES = {
    "data": {"source": "models:image_data", "args": {"size": 64}},
    "loss": "cross_entropy",
    "optimizer": {"name": "SGD", "args": {"lr": 1e-3, "momentum": 0.9}},
    "batch_size": 2,
}
"""Small minibatches of networks with many norms."""
BERT = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
MORE: dict[str, dict[str, Any]] = {
    "mobilenet": {
        "model": {"source": "torchvision:mobilenet_v3_small", "args": {"num_classes": 10}},
        **IMAGES,
    },
    "regnet": {
        "model": {"source": "torchvision:regnet_y_400mf", "args": {"num_classes": 10}},
        **IMAGES,
    },
    "vit": {
        "model": {"source": "timm:vit_tiny_patch16_224", "args": {"num_classes": 10}},
        **IMAGES,
        "data": {"source": "models:image_data", "args": {"size": 224}},
    },
    "bert": {
        "model": {"source": "transformers:bert", "args": BERT},
        "data": {"source": "models:token_data", "args": {"tokens": 64, "vocabulary": 2048}},
        "loss": "output",
        "optimizer": {"name": "AdamW", "args": {"lr": 1e-4}},
        "batch_size": 4,
    },
}


@click.command()
@click.argument("names", nargs=-1)
@click.option("--stages", default=1, show_default=True)
@click.option("--ways", default="none,stage,groups", show_default=True)
@click.option("--turns", default=1, show_default=True)
def main(names: tuple[str, ...], stages: int, ways: str, turns: int) -> None:
    os.environ["PYTHONPATH"], os.environ["OMP_NUM_THREADS"] = str(BENCH), "1"
    folder, rows = Path(tempfile.mkdtemp(prefix="bench-")), []
    for name in names or (*MODELS, *MORE):
        own = folder / name
        plans = {way: planned(name, way, stages, own / way) for way in ways.split(",")}
        print(chosen(name, own / "auto"), flush=True)
        for turn in range(turns):
            for way in plans:
                rows.append(row(name, way, plans, own / way, turn))
                print(rows[-1], flush=True)
    frame = pd.DataFrame(rows)
    print(frame.to_string(index=False, float_format="%.4f"))
    errors = frame.error.abs()
    print(f"median {errors.median():.1%}, worst {errors.max():.1%}")


def chosen(name: str, folder: Path) -> dict[str, Any]:
    """What auto takes, with the milliseconds of all ways, and the seconds that they compile in."""
    folder.mkdir(parents=True)
    call("pd-profile", prepare(name, "auto", folder, 16), "-o", folder / "profile")
    profile = read_profile(folder / "profile/profile.json")
    ways = {str(way.compile): way for way in profile.compile_compared}
    return {"model": name, "auto": profile.compile, "refused": profile.not_compiled} | {
        way: f"{1e3 * own.seconds:.1f} ms, {own.compile_seconds:.1f} s, {own.forms}/{own.groups}"
        for way, own in ways.items()
    }


def planned(name: str, way: str, stages: int, folder: Path) -> Plan:
    folder.mkdir(parents=True)
    call("pd-profile", prepare(name, way, folder, 16), "-o", folder / "profile")
    links = ("--machines", stages, "--bandwidth", "5GB", "--straight")
    call("pd-optimize", folder / "profile/graph.txt", *links, "-o", folder / "plan")
    return read_plan(folder / "plan/plan.json")


def row(name: str, way: str, plans: Mapping[str, Plan], folder: Path, turn: int) -> dict[str, Any]:
    """Trains for some seconds, all ways equally many minibatches."""
    expected = {each: plan.predicted.expected_seconds_per_minibatch for each, plan in plans.items()}
    own = expected[way]
    assert own is not None
    config = prepare(name, way, folder, int(SECONDS / max(filter(None, expected.values()))))
    run = folder / f"run-{turn}"
    call(
        *("pd-train", folder / "plan/plan.json", "--config", config, "-o", run),
        "--no-evaluate",
    )
    summary = json.loads((run / "summary.json").read_text())
    profile = read_profile(folder / "profile/profile.json")
    return {
        "model": name,
        "compiled": way,
        "expected": own,
        "measured": summary["seconds_per_minibatch"],
        "error": own / summary["seconds_per_minibatch"] - 1,
        "saved": sum(node.saved_bytes or 0 for node in profile.nodes),
        "loss": summary["final_loss"],
    }


def prepare(name: str, way: str, folder: Path, minibatches: int) -> Path:
    """The run config, for an epoch of so many minibatches."""
    run: dict[str, Any] = {"format": "pipedream-run/1", **(MODELS | MORE)[name]}
    data = {**run["data"]}
    data["args"] = {**data.get("args", {}), "examples": minibatches * run["batch_size"]}
    own = {**run, "data": data, "compile": way}
    path = folder / f"run-{minibatches}.yaml"
    path.write_text(yaml.safe_dump(own))
    return path


if __name__ == "__main__":
    main()

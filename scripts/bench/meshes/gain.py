"""What does a mesh of two devices gain? `python scripts/bench/meshes/gain.py [gpt] [vgg]`

Profiles a model, plans it for one worker and for two devices that share its operators, and trains
both plans, whole processes in turns. Prints seconds per update, the gain beside the one that the
plan expects, and the memory of a device beside that of the plan.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

sys.path.append(str(Path(__file__).parents[1]))

from efficiency import call

from pipedream.graph.plan import Plan, read_plan

BENCH = Path(__file__).parents[1]
TURNS = 3
CASES: dict[str, dict[str, Any]] = {
    "gpt": {
        "config": {
            "model": {
                "source": "models:gpt",
                "args": {"length": 64, "width": 512, "heads": 8, "layers": 4, "dropout": 0.0},
            },
            "data": {"source": "models:gpt_data", "args": {"length": 64, "examples": 640}},
            "loss": "models:gpt_loss",
            "optimizer": {"name": "AdamW", "args": {"lr": 1e-4}},
            "batch_size": 16,
        },
        "shards": [
            *("*queries_keys_values=S(0, chunks=3)", "*attention.out=S(1)"),
            *("*mlp.0=S(0)", "*mlp.2=S(1)", "head=S(0)"),
        ],
    },
    "vgg": {
        "config": {
            "model": {"source": "models:vgg16_head"},
            "data": {"source": "models:vgg16_head_data"},
            "loss": "cross_entropy",
            "optimizer": {"name": "SGD", "args": {"lr": 1e-3}},
            "batch_size": 64,
        },
        "shards": ["1.weight=S(0)", "3.weight=S(1)"],
    },
}


def main() -> None:
    os.environ["PYTHONPATH"] = str(BENCH)
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            print(f"{name}\n{pd.DataFrame(measured(name, Path(folder))).to_string(index=False)}\n")


def measured(model: str, folder: Path) -> Iterator[dict[str, str]]:
    case = CASES[model]
    config = {"format": "pipedream-run/1", "microbatches": 1, **case["config"]}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    measure_network(folder)
    call("pd-profile", folder / "run.yaml", "-o", folder, "--workers", 2, "--repeats", 10)
    shards = [word for text in case["shards"] for word in ("--shard", text)]
    round_ = ("--schedule", "flush", "--microbatches", 1, "--optimizer", optimizer(config))
    graph, one = folder / "graph.txt", ("--machines", 1, "--bandwidth", "1GB")
    two = ("--cluster", folder / "network" / "cluster.yaml", "--mesh", 2, *shards)
    for name, options in (("one", one), ("two", two)):
        call("pd-optimize", graph, *options, *round_, "-o", folder / name)
    for turn in range(TURNS):
        runs = {plan: run(folder, plan, turn) for plan in ("one", "two")}
        yield row(runs, *(read_plan(folder / plan / "plan.json") for plan in ("one", "two")))


def measure_network(folder: Path, processes: int = 2, limited: Sequence[object] = ()) -> None:
    """Of so many processes beside the passes of run.yaml, in FOLDER/network."""
    measured = [program("pd-profile"), folder / "run.yaml", "--network", "-o", folder / "network"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    words = [*launcher(processes), *limited, *measured]
    subprocess.run(list(map(str, words)), check=True, **silent)


def launcher(processes: int) -> list[object]:
    """The words before a program of which there are so many processes."""
    return [program("torchrun"), "--nproc-per-node", processes, "--no-python"]


def program(name: str) -> Path:
    return Path(sys.executable).with_name(name)


def stages(plan: Plan) -> str:
    """The devices of each stage, and its mesh: `2 + 4 (2x2)`."""
    return " + ".join(
        f"{len(s.ranks)}" + (f" ({'x'.join(map(str, s.mesh))})" if s.mesh else "")
        for s in plan.stages
    )


def optimizer(config: dict[str, Any]) -> str:
    return "adam" if config["optimizer"]["name"] == "AdamW" else "sgd"


def run(folder: Path, plan: str, turn: int) -> dict[str, Any]:
    """summary.json of a run of the plan."""
    out = folder / f"{plan}-{turn}"
    call("pd-train", folder / plan / "plan.json", "--config", folder / "run.yaml", "-o", out)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def row(runs: dict[str, dict[str, Any]], one: Plan, two: Plan) -> dict[str, str]:
    seconds = {plan: summary["seconds_per_minibatch"] for plan, summary in runs.items()}
    expected = {"one": one.predicted.seconds_in_a_run, "two": two.predicted.seconds_in_a_run}
    memory = max(rank["peak_memory_bytes"] for rank in runs["two"]["ranks"])
    held = two.stages[0].parameter_bytes / one.stages[0].parameter_bytes
    gain, planned = seconds["one"] / seconds["two"], expected["one"] / expected["two"]
    return {
        "one worker": f"{seconds['one'] * 1e3:.1f} ms",
        "expected": f"{expected['one'] * 1e3:.1f} ms",
        "two devices": f"{seconds['two'] * 1e3:.1f} ms",
        "expected ": f"{expected['two'] * 1e3:.1f} ms",
        "gain": f"{gain:.3f}",
        "planned": f"{planned:.3f}",
        "parameters held": f"{held:.3f}",
        "memory": f"{memory / 1e6:.0f} MB",
        "in the plan": f"{two.stages[0].memory_bytes / 1e6:.0f} MB",
    }


if __name__ == "__main__":
    main()

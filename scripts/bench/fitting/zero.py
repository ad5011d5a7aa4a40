"""What do replicas gain that divide the optimizer's state (ZeRO-1), and what does it cost them?

`python scripts/bench/fitting/zero.py` trains a wide network with Adam on two replicas, whole
and divided in turns (`turns`), and prints of each the seconds of an update with its exchange, of
waiting for the sums, and of a minibatch, and the bytes of the optimizer's state and of the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipedream.graph.measured_run import read_measured

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import TensorDataset

WIDTH, LAYERS, BATCH, MINIBATCHES = 1024, 8, 16, 400
SCRIPTS = Path(__file__).resolve().parent


def wide() -> nn.Module:
    from torch import nn

    layers = (part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return nn.Sequential(*layers)


def points() -> tuple[TensorDataset, None]:
    import torch
    from torch.utils.data import TensorDataset

    x, y = torch.randn(2, BATCH * MINIBATCHES, WIDTH)
    return TensorDataset(x, y), None


CONFIG = {
    "format": "pipedream-run/1",
    "model": {"source": "zero:wide"},
    "data": {"source": "zero:points"},
    "loss": "mse_loss",
    "batch_size": BATCH,
    "microbatches": 4,
    "optimizer": {"name": "Adam", "args": {"lr": 0.0001}},
}


def take_turns() -> Any:
    """Returns what `turns` beside this folder has."""
    sys.path.append(str(SCRIPTS.parent))
    return import_module("turns").take_turns


def command(name: str, *arguments: object) -> list[object]:
    return [Path(sys.executable).with_name(name), *arguments]


def main() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        config = folder / "run.yaml"
        config.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
        graph = folder / "profile" / "graph.txt"
        steps = [command("pd-profile", config, "-o", graph.parent, "--repeats", 3)]
        runs = []
        for zero in ("never", "always"):
            shape = "--machines", 2, "--bandwidth", "1GB", "--replicas", 2, "--schedule", "flush"
            plan = folder / f"plan-{zero}"
            steps.append(command("pd-optimize", graph, *shape, "--zero", zero, "-o", plan))
            done = "--config", config, "--no-evaluate", "-o", folder / zero
            runs.append(command("pd-train", plan / "plan.json", *done))
        for step in steps:
            subprocess.run(list(map(str, step)), check=True, stdout=subprocess.DEVNULL)
        take_turns()(runs)
        show(folder)


def show(folder: Path) -> None:
    """A line for each run, and the ratio of the second to the first."""
    rows = []
    for zero in ("never", "always"):
        measured = read_measured(folder / zero / "measured.json")
        plan = json.loads((folder / f"plan-{zero}" / "plan.json").read_text())
        first, *_ = json.loads((folder / zero / "summary.json").read_text())["ranks"]
        rank = measured.ranks[0]
        assert rank.update is not None
        assert rank.all_reduce is not None
        rows.append(
            {
                "backward, ms": 1e3 * rank.backward.median,
                "update, ms": 1e3 * rank.update.median,
                "waiting for sums, ms": 1e3 * rank.all_reduce.median,
                "minibatch, ms": 1e3 * measured.seconds_per_minibatch,
                "planned minibatch, ms": 1e3
                * plan["predicted"]["simulated"]["seconds_per_minibatch"],
                "planned state, MB": plan["stages"][0]["memory"]["optimizer_state"] / 1e6,
                "process, MB": first["peak_memory_bytes"] / 1e6,
            }
        )
    print(f"{'':24}{'whole':>10}{'divided':>10}{'ratio':>8}")
    for name in rows[0]:
        whole, divided = rows[0][name], rows[1][name]
        print(f"{name:24}{whole:10.1f}{divided:10.1f}{divided / whole:8.2f}")


if __name__ == "__main__":
    main()

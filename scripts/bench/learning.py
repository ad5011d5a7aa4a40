"""What late gradients cost: `python scripts/bench/learning.py [4] [8] [-o FOLDER]`.

Trains a byte-level GPT on the text of Python's help topics (configs/topics_gpt.py) with pd-train,
on as many processes as stages, and tries the checkpoint of every epoch on the held-out text:

- 4 stages: flush and weight stashing;
- 8 stages: these, and each option against late gradients (docs/explanation/late-gradients.md).

All runs of a kind differ in nothing else. One update learns from one minibatch, of the same samples
in the same order: flush has one microbatch to an update, which is to train the plain model (several
smaller ones would learn the same, faster). So at any number of samples all have made as many
updates, and what differs is how late the gradients come.

Runs that are there already are not made again. Writes learning.csv and learning.svg to the folder;
about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LENGTH = 64
EXAMPLES = 6556
"""Windows of that length to learn from."""


@dataclass(frozen=True)
class Kind:
    """Runs with one number of stages; a run for each entry of `runs`: schedule, options."""

    stages: int
    batch_size: int
    epochs: int
    rate: float
    runs: dict[str, tuple[str, dict[str, Any]]]
    scheduler: dict[str, Any] = field(default_factory=dict)

    def config(self, options: dict[str, Any]) -> dict[str, Any]:
        """A block of the model for each stage."""
        model = {"length": LENGTH, "width": 64, "heads": 4, "layers": self.stages, "dropout": 0.0}
        return {
            "format": "pipedream-run/1",
            "model": {"source": "topics_gpt:model", "args": model},
            "data": {"source": "topics_gpt:data", "args": {"length": LENGTH}},
            "loss": "topics_gpt:loss",
            "optimizer": {"name": "AdamW", "args": {"lr": self.rate, "weight_decay": 0.01}},
            "batch_size": self.batch_size,
            "drop_last": True,
            "microbatches": 1,
            "epochs": self.epochs,
            **self.scheduler,
            **({"asynchronous": options} if options else {}),
        }


FLUSH = ("flush", {})
STASHING = ("weight-stashing", {})


def with_option(**options: Any) -> tuple[str, dict[str, Any]]:
    return "weight-stashing", options


def once(updates: int, rate: float) -> dict[str, Any]:
    """A tenth of the updates warm up, the rest cool down along a cosine."""
    args = {"max_lr": rate, "total_steps": updates, "pct_start": 0.1, "cycle_momentum": False}
    return {"scheduler": {"name": "OneCycleLR", "args": args, "every": "update"}}


KINDS = {
    4: Kind(
        stages=4,
        batch_size=4,
        epochs=4,
        rate=1e-3,
        runs={"flush": FLUSH, "weight stashing": STASHING},
        scheduler=once(4 * (EXAMPLES // 4), 1e-3),
    ),
    8: Kind(
        stages=8,
        batch_size=16,
        epochs=3,
        rate=2e-3,
        runs={
            "flush": FLUSH,
            "weight stashing": STASHING,
            "Nesterov form": with_option(nesterov=0.99),
            "weight prediction": with_option(weight_prediction=True),
            "rate correction": with_option(rate_correction=400),
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", type=int, default=list(KINDS))
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/learning"))
    asked = parser.parse_args()
    paths = [str(CONFIGS), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path[:0] = paths
    found = []
    for stages in asked.stages:
        folder = asked.output / f"{stages}-stages"
        for name in KINDS[stages].runs:
            run = train(KINDS[stages], name, folder)
            found.append(held_out(KINDS[stages], run).assign(stages=stages, run=name))
    table = pd.concat(found, ignore_index=True)
    table.to_csv(asked.output / "learning.csv", index=False)
    show(table)
    draw(table, asked.output / "learning.svg")


def train(kind: Kind, name: str, folder: Path) -> Path:
    """The folder of the run, made unless it is there."""
    run = folder / name.replace(" ", "-")
    schedule, options = kind.runs[name]
    if (run / "summary.json").exists():
        return run
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "plan" / "plan.json"
    config = folder / f"{run.name}.yaml"
    config.write_text(yaml.safe_dump(kind.config(options)))
    if not plan.exists():
        call("pd-profile", config, "-o", folder, "--repeats", 5)
        where = ("--machines", kind.stages, "--bandwidth", "5GB", "--straight")
        call("pd-optimize", folder / "graph.txt", *where, "-o", plan.parent)
    call("pd-train", plan, "--config", config, "-o", run, "--schedule", schedule)
    return run


def call(program: str, *arguments: object) -> None:
    command = [Path(sys.executable).with_name(program), *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def held_out(kind: Kind, run: Path) -> pd.DataFrame:
    """Samples learned from and mean held-out loss (nats a byte) after each epoch, and before."""
    import topics_gpt  # type: ignore[import-not-found]
    import torch

    from pipedream.graph.run_config import RunConfig
    from pipedream.runtime.held_out import evaluate

    config = RunConfig.model_validate(kind.config({}))
    training, held = topics_gpt.data(LENGTH)
    assert len(training) == EXAMPLES
    samples = EXAMPLES // kind.batch_size * kind.batch_size
    model = topics_gpt.model(**config.model.args)
    rows = [
        (
            epoch * samples,
            evaluate(
                model,
                run / "checkpoints" / f"epoch-{epoch:04}",
                held,
                config,
                topics_gpt.loss,
                torch.device("cpu"),
                {},
            )["held_out_loss"],
        )
        for epoch in range(1, kind.epochs + 1)
    ]
    return pd.DataFrame(rows, columns=["samples", "held_out_loss"])


def show(table: pd.DataFrame) -> None:
    """The last loss of each run, against flush's, and how much of the gap it closes."""
    for stages, runs in table.groupby("stages"):
        last = runs.groupby("run", sort=False).held_out_loss.last()
        gap = last["weight stashing"] - last["flush"]
        print(f"\n{stages} stages, {runs.samples.max():,} samples")
        print(f"{'':20}{'loss':>8}{'over flush':>12}{'of the gap closed':>20}")
        for name, loss in last.items():
            over = "" if name == "flush" else f"{loss / last['flush'] - 1:.1%}"
            plain = name in ("flush", "weight stashing")
            closed = "" if plain else f"{(last['weight stashing'] - loss) / gap:.0%}"
            print(f"{name:20}{loss:8.4f}{over:>12}{closed:>20}")


def draw(table: pd.DataFrame, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "learning", "font.size": 9}
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    kinds = list(table.groupby("stages"))
    figure, axes = plt.subplots(1, len(kinds), figsize=(4.6 * len(kinds), 3.4), squeeze=False)
    for axis, (stages, runs) in zip(axes[0], kinds, strict=True):
        for name, curve in runs.groupby("run", sort=False):
            style = {"flush": "k-", "weight stashing": "C3-"}.get(str(name), "--")
            axis.plot(curve.samples, curve.held_out_loss, style, marker=".", label=name)
        axis.set_title(f"{stages} stages")
        axis.set_xlabel("samples learned from")
        axis.set_ylabel("held-out loss, nats a byte")
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.set_xlim(left=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()

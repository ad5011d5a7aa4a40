"""Is a plan's memory what a run needs? `python scripts/bench_memory.py [NAME ...]`.

Profiles, plans and trains each model on two processes, one stage each, and prints for each rank
what the plan says, item by item, and the most that its tensors took. glibc's allocator is told to
return what is freed: else it keeps up to a third more, in holes, which is faster (README, Memory).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

MINIBATCHES = 10
SCRIPTS = Path(__file__).parent


def images(size: int, examples: int) -> tuple[TensorDataset, None]:
    """Noise of three channels, and one of ten classes."""
    import torch
    from torch.utils.data import TensorDataset

    return TensorDataset(torch.randn(examples, 3, size, size), torch.arange(examples) % 10), None


def some_topics(length: int, examples: int) -> tuple[Any, None]:
    """The first windows of configs/topics_gpt.py's text."""
    import topics_gpt  # type: ignore[import-not-found]
    from torch.utils.data import TensorDataset

    whole, _ = topics_gpt.data(length)
    return TensorDataset(*whole[:examples]), None


@dataclass(frozen=True)
class Case:
    """A model, its data (a factory of this file), and how it learns."""

    model: dict[str, Any]
    data: dict[str, Any]
    batch_size: int
    optimizer: dict[str, Any]
    planned: tuple[str, ...]
    loss: str = "cross_entropy"

    def config(self) -> dict[str, Any]:
        factory, *_ = self.data
        args = self.data[factory] | {"examples": MINIBATCHES * self.batch_size}
        return {
            "format": "pipedream-run/1",
            "model": self.model,
            "data": {"source": f"bench_memory:{factory}", "args": args},
            "loss": self.loss,
            "optimizer": self.optimizer,
            "batch_size": self.batch_size,
            "epochs": 1,
        }


MOMENTUM = {"name": "SGD", "args": {"lr": 0.001, "momentum": 0.9}}
GPT = {"length": 64, "width": 512, "heads": 8, "layers": 8}
CASES = {
    "vgg11_bn": Case(
        {"source": "torchvision:vgg11_bn", "args": {"num_classes": 10}},
        {"images": {"size": 64}},
        32,
        MOMENTUM,
        ("--optimizer", "momentum"),
    ),
    "gpt": Case(
        {"source": "topics_gpt:model", "args": GPT},
        {"some_topics": {"length": 64}},
        16,
        {"name": "AdamW", "args": {"lr": 0.0001}},
        ("--optimizer", "adam"),
        "topics_gpt:loss",
    ),
    "resnet50": Case(
        {"source": "torchvision:resnet50", "args": {"num_classes": 10}},
        {"images": {"size": 96}},
        16,
        MOMENTUM,
        ("--optimizer", "momentum"),
    ),
    "resnet50, recomputed": Case(
        {"source": "torchvision:resnet50", "args": {"num_classes": 10}},
        {"images": {"size": 96}},
        16,
        MOMENTUM,
        ("--optimizer", "momentum", "--recompute", "always"),
    ),
    "resnet50, flush": Case(
        {"source": "torchvision:resnet50", "args": {"num_classes": 10}},
        {"images": {"size": 96}},
        16,
        MOMENTUM,
        ("--optimizer", "momentum", "--schedule", "flush"),
    ),
}


def run(command: str, *arguments: object) -> None:
    paths = [str(SCRIPTS), str(SCRIPTS.parent / "configs"), os.environ.get("PYTHONPATH", "")]
    subprocess.run(
        [Path(sys.executable).with_name(command), *map(str, arguments)],
        check=True,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MALLOC_MMAP_THRESHOLD_": "262144"},
    )


def measure(case: Case, folder: Path) -> None:
    """Prints a line for each rank: planned and measured megabytes, and what is planned."""
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(case.config()), encoding="utf-8")
    run("pd-profile", config, "-o", folder / "profile", "--warmup", 0, "--repeats", 1)
    cluster = ("--machines", 2, "--bandwidth", "10GB", "--straight")
    graph, plan = folder / "profile" / "graph.txt", folder / "plan"
    run("pd-optimize", graph, *cluster, *case.planned, "-o", plan)
    done = ("--config", config, "--no-evaluate", "-o", folder / "run")
    run("pd-train", plan / "plan.json", *done)
    stages = json.loads((plan / "plan.json").read_text())["stages"]
    for rank in json.loads((folder / "run" / "summary.json").read_text())["ranks"]:
        planned, measured = rank["predicted_memory_bytes"], rank["peak_memory_bytes"]
        items = stages[rank["stage"]]["memory"]
        print(
            f"  rank {rank['rank']}: planned {planned / 1e6:7.1f} MB,"
            f" measured {measured / 1e6:7.1f} MB, {planned / measured - 1:+.1%}   "
            + ", ".join(f"{name} {size / 1e6:.0f}" for name, size in items.items()),
            flush=True,
        )


def main(names: list[str]) -> None:
    for name, case in CASES.items():
        if not names or name in names:
            print(name, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                measure(case, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])

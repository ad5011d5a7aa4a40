"""Is a plan's memory what a run needs, and does it stay so?

`python scripts/bench/memory.py [NAME ...]` profiles, plans and trains each model on two processes,
one stage each, and prints for each rank what the plan says, item by item, the most that its tensors
took, and how many versions of its weights and minibatches in flight there were, of those that the
schedule allows. `python scripts/bench/memory.py long` trains smaller ones for 2,000 minibatches and
prints the resident memory of each rank on the way.

glibc's allocator is told to return what is freed: else it keeps up to a third more, in holes, which
is faster (docs/how-to/memory.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipedream.graph.plan import read_plan
from pipedream.schedule.policy import policy
from pipedream.schedule.spec import PipelineSpec

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

MINIBATCHES = 10
MARKS = (200, 500, 1_000, 2_000)
"""After so many minibatches of a long run the resident memory is looked at."""
SCRIPTS = Path(__file__).resolve().parent


class Repeated:
    """The examples of a data set again and again, until there are so many."""

    def __init__(self, dataset: TensorDataset, examples: int) -> None:
        self.dataset, self.examples = dataset, examples

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % len(self.dataset)]


def images(size: int, examples: int) -> tuple[Repeated, None]:
    """RandomGradients of three channels, and one of ten classes."""
    import torch
    from torch.utils.data import TensorDataset

    few = min(examples, 320)
    noise = TensorDataset(torch.randn(few, 3, size, size), torch.arange(few) % 10)
    return Repeated(noise, examples), None


def some_topics(length: int, examples: int) -> tuple[Any, None]:
    """The first windows of configs/topics_gpt.py's text."""
    import topics_gpt  # type: ignore[import-not-found]
    from torch.utils.data import TensorDataset

    whole, _ = topics_gpt.data(length)
    return Repeated(TensorDataset(*whole[:320]), examples), None


@dataclass(frozen=True)
class Case:
    """A model, its data (a factory of this file), and how it learns."""

    model: dict[str, Any]
    data: dict[str, Any]
    batch_size: int
    optimizer: dict[str, Any]
    planned: tuple[str, ...]
    loss: str = "cross_entropy"
    minibatches: int = MINIBATCHES
    microbatches: int = 1

    def config(self) -> dict[str, Any]:
        factory, *_ = self.data
        args = self.data[factory] | {"examples": self.minibatches * self.batch_size}
        return {
            "format": "pipedream-run/1",
            "model": self.model,
            "data": {"source": f"memory:{factory}", "args": args},
            "loss": self.loss,
            "optimizer": self.optimizer,
            "batch_size": self.batch_size,
            "microbatches": self.microbatches,
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
        ("--optimizer", "momentum", "--schedule", "flush", "--microbatches", "4"),
        minibatches=12,
        microbatches=4,
    ),
}


SMALL_GPT = {"length": 64, "width": 128, "heads": 4, "layers": 4}
SMALL_RESNET = Case(
    {"source": "torchvision:resnet18", "args": {"num_classes": 10}},
    {"images": {"size": 32}},
    8,
    MOMENTUM,
    ("--optimizer", "momentum"),
    minibatches=MARKS[-1],
)
LONG = {"resnet18": SMALL_RESNET} | {
    f"gpt, {schedule}": Case(
        {"source": "topics_gpt:model", "args": SMALL_GPT},
        {"some_topics": {"length": 64}},
        8,
        {"name": "AdamW", "args": {"lr": 0.0001}},
        ("--optimizer", "adam", "--schedule", schedule, *more),
        "topics_gpt:loss",
        MARKS[-1],
        microbatches,
    )
    for schedule, more, microbatches in (
        ("weight-stashing", (), 1),
        ("2bw", ("--microbatches", "4"), 4),
        ("flush", ("--microbatches", "4"), 4),
    )
}


def start(command: str, *arguments: object) -> subprocess.Popen[bytes]:
    paths = [str(SCRIPTS), str(SCRIPTS.parents[1] / "configs"), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [Path(sys.executable).with_name(command), *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MALLOC_MMAP_THRESHOLD_": "262144"},
    )


def ended(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        sys.exit(f"{process.args!r} failed")


def train(case: Case, folder: Path) -> subprocess.Popen[bytes]:
    """Profiles and plans, and starts to train."""
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(case.config()), encoding="utf-8")
    ended(start("pd-profile", config, "-o", folder / "profile", "--warmup", 1, "--repeats", 1))
    cluster = ("--machines", 2, "--bandwidth", "10GB", "--straight")
    graph, plan = folder / "profile" / "graph.txt", folder / "plan"
    ended(start("pd-optimize", graph, *cluster, *case.planned, "-o", plan))
    done = ("--config", config, "--no-evaluate", "-o", folder / "run")
    return start("pd-train", plan / "plan.json", *done)


def trained(case: Case, folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """What each rank reports, and in words what it held at most of what its schedule allows."""
    plan = read_plan(folder / "plan" / "plan.json")
    allowed = policy(PipelineSpec(plan.schedule, plan.replicas, (), case.microbatches))
    for rank in json.loads((folder / "run" / "summary.json").read_text())["ranks"]:
        most = allowed.peak(rank["stage"])
        assert rank["weight_versions"] <= most.versions
        assert rank["in_flight"] <= most.in_flight
        yield (
            rank,
            f"versions {rank['weight_versions']} of {most.versions},"
            f" in flight {rank['in_flight']} of {most.in_flight}",
        )


def show_plan(case: Case, folder: Path) -> None:
    """For each rank planned and measured megabytes, and what is planned."""
    ended(train(case, folder))
    stages = json.loads((folder / "plan" / "plan.json").read_text())["stages"]
    for rank, held in trained(case, folder):
        planned, measured = rank["predicted_memory_bytes"], rank["peak_memory_bytes"]
        items = stages[rank["stage"]]["memory"]
        print(
            f"  rank {rank['rank']}: planned {planned / 1e6:7.1f} MB,"
            f" measured {measured / 1e6:7.1f} MB, {planned / measured - 1:+.1%}, {held}   "
            + ", ".join(f"{name} {size / 1e6:.0f}" for name, size in items.items()),
            flush=True,
        )


def show_long(case: Case, folder: Path) -> None:
    """For each rank its resident memory on the way, also as a ratio to the first."""
    process = train(case, folder)
    metrics = folder / "run" / "metrics.jsonl"
    seen: dict[int, Mapping[int, int]] = {}
    while process.poll() is None:
        time.sleep(0.2)
        done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        # The last look is a little before the end: the processes are gone then.
        due = [mark for mark in MARKS if done >= mark - mark // 100 and mark not in seen]
        if due:
            seen[due[-1]] = resident(process.pid)
    ended(process)
    for number, (_, held) in enumerate(trained(case, folder)):
        sizes = {mark: found[number] for mark, found in seen.items() if number in found}
        first = next(iter(sizes.values()))
        on_the_way = (
            f"{size / 1e6:.1f} MB ({size / first:.3f}) after {mark}" for mark, size in sizes.items()
        )
        print(f"  rank {number}: {held}; resident {', '.join(on_the_way)}", flush=True)


def resident(launcher: int) -> dict[int, int]:
    """Of each rank, the bytes that its process has in memory, without mapped files."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = {}
    for child in children:
        with suppress(FileNotFoundError, ProcessLookupError, StopIteration):
            places = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            rank = next(int(place[5:]) for place in places if place.startswith(b"RANK="))
            status = Path(f"/proc/{child}/status").read_text().splitlines()
            (line,) = (line for line in status if line.startswith("RssAnon:"))
            found[rank] = int(line.split()[1]) * 1024
    return found


def main(names: list[str]) -> None:
    long = names[:1] == ["long"]
    wanted = names[1:] if long else names
    for name, case in (LONG if long else CASES).items():
        if not wanted or name in wanted:
            print(name, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                (show_long if long else show_plan)(case, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])

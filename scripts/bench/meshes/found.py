"""What do found shardings gain on two processes of this machine or more, and is it as expected?

    python scripts/bench/meshes/found.py OUT [MODEL...] [--turns 3] [--processes 2] [--part 1]

Measures the network, and in each turn profiles a model with as many workers at a time, plans with
`--intra-op none` and `auto`, and trains both plans as whole processes. Prints how much longer
updates take than their plans expect, which is of a core for each process, and the gain. With --part
each process has that part of a core (`part_of_core.py`), in short `turns`, so that there may be
more of them than cores; the profile is made so too, by as many programs at once.

Runs last tens of seconds, of which the first fifth does not count: the heap still grows, and a
minibatch of VGG-16's classifier takes twice as long. The bandwidth of memory that two
processes have at once may change by half within a minute, on a virtual machine whose cores are
moved: now two of them share the way to memory, now each has its own. Where weights are large, time
follows it. So cores are kept `awake`, by which they are moved less, and what is said of a plan is
the median of its turns; the last column has the bandwidth, in GB/s for each process, before and
after the profile and after both runs. `slower` is by how much the cores themselves were slower
during the run than during the profile (`pace.py`), in percent, and `at its pace` how much longer
the updates took than that explains.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import click
import pandas as pd
import yaml

sys.path.append(str(Path(__file__).parents[1]))

from awake import awake
from efficiency import call
from gain import launcher, measure_network, optimizer, program, stages
from pace import Pace, pace
from streaming import streaming
from turns import turns as short_turns

from pipedream.graph.plan import Plan, read_plan

BENCH = Path(__file__).parents[1]


def _transformer(source: str, sizes: dict[str, Any], tokens: int, examples: int) -> dict[str, Any]:
    args = {"tokens": tokens, "examples": examples, "vocabulary": sizes["vocab_size"]}
    return {
        "model": {"source": f"transformers:{source}", "args": sizes},
        "data": {"source": "models:token_data", "args": args},
        "loss": "output",
        "optimizer": {"name": "AdamW", "args": {"lr": 1e-4}},
        "batch_size": 4,
    }


def _images(source: str, size: int, batch: int, examples: int, **args: Any) -> dict[str, Any]:
    return {
        "model": {"source": source, "args": args},
        "data": {"source": "models:image_data", "args": {"size": size, "examples": examples}},
        "batch_size": batch,
    }


CASES: dict[str, dict[str, Any]] = {
    "mlp": {
        "model": {"source": "models:mlp", "args": {"width": 1536}},
        "data": {"source": "models:mlp_data", "args": {"width": 1536, "examples": 16384}},
        "batch_size": 64,
    },
    "wide": {
        "model": {"source": "models:mlp", "args": {"width": 2048, "layers": 4}},
        "data": {"source": "models:mlp_data", "args": {"width": 2048, "examples": 8192}},
        "batch_size": 16,
    },
    "llama": _transformer(
        "llama",
        {
            "vocab_size": 4096,
            "hidden_size": 512,
            "intermediate_size": 1376,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
        *(64, 320),
    ),
    "gpt2": _transformer(
        "gpt2", {"vocab_size": 4096, "n_embd": 512, "n_layer": 4, "n_head": 8}, 64, 320
    ),
    "vgg11": _images("torchvision:vgg11", 64, 8, 768, num_classes=10),
    "head": {
        "model": {"source": "models:vgg16_head"},
        "data": {"source": "models:vgg16_head_data", "args": {"examples": 3840}},
        "batch_size": 32,
    },
    "resnet18": _images("torchvision:resnet18", 64, 8, 384, num_classes=10),
    "vit": _images("timm:vit_tiny_patch16_224", 224, 2, 96, num_classes=10, drop_rate=0.0),
}


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("models", nargs=-1, type=click.Choice(list(CASES)))
@click.option("--turns", default=3, show_default=True)
@click.option("--processes", default=2, show_default=True)
@click.option("--part", default=1.0, show_default=True, help="Of a core, for each process.")
def main(out: Path, models: tuple[str, ...], turns: int, processes: int, part: float) -> None:
    os.environ |= {"PYTHONPATH": str(BENCH), "OMP_NUM_THREADS": "1"}
    table = []
    with awake(), pace(out) as watched, short_turns() if part < 1 else nullcontext():
        for name in models or CASES:
            prepare(out / name, CASES[name], processes, part)
            for turn in range(turns):
                row = taken(out / name, processes, part, watched)
                table.append({"model": name, "turn": turn, **row})
                print(*table[-1].values(), sep=" | ", flush=True)
    frame = pd.DataFrame(table)
    kinds = ["of auto", "at its pace"]
    plans = frame.groupby("model", sort=False)[[*kinds, "gain"]].median()
    print(f"\n{frame.to_string(index=False)}\n\nMedians of turns:\n{plans.to_string()}")
    for (which, known), kind in product([("Plans", plans), ("Runs", frame)], kinds):
        errors = known[kind].abs()
        print(f"{which}, {kind}: median {errors.median():.1f} %, worst {errors.max():.1f} %")


def prepare(folder: Path, case: dict[str, Any], processes: int, part: float) -> None:
    """Writes run.yaml, and measures the network, into the folder."""
    config = {
        "format": "pipedream-run/1",
        "microbatches": 2,
        "loss": "cross_entropy",
        "optimizer": {"name": "SGD", "args": {"lr": 1e-3}},
        **case,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    measure_network(folder, processes, limited(part))


def limited(part: float) -> list[object]:
    """The words before a program that has a part of a core."""
    return [] if part == 1 else [sys.executable, Path(__file__).with_name("part_of_core.py"), part]


def seconds_of(run: Path) -> float:
    """Returns those of a minibatch once the heap has grown, after the first fifth of the run."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    ends = [json.loads(line)["seconds"] for line in lines]
    first = len(ends) // 5
    return float(ends[-1] - ends[first]) / (len(ends) - 1 - first)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((folder / "run.yaml").read_text())
    return config


def round_of(config: dict[str, Any]) -> tuple[object, ...]:
    return "--schedule", "flush", "--microbatches", 2, "--optimizer", optimizer(config)


def profile(folder: Path, processes: int, part: float) -> None:
    """With the others at the same work: as workers, or as programs with a part of a core each, of
    which the first one's profile is taken.
    """
    shards = ",".join(str(count) for count in (2, 4, 8) if count <= processes)
    asked = (folder / "run.yaml", "--shards", shards, "-o")
    if part == 1:
        call("pd-profile", *asked, folder, "--workers", processes)
        return
    folders = [folder, *(folder / f"beside-{number}" for number in range(1, processes))]
    running = [
        subprocess.Popen(
            list(map(str, [*limited(part), program("pd-profile"), *asked, out])),
            stdout=subprocess.DEVNULL,
            env={**os.environ, "LOCAL_RANK": str(number)},
        )
        for number, out in enumerate(folders)
    ]
    assert {each.wait() for each in running} == {0}


def taken(folder: Path, processes: int, part: float, watched: Pace) -> dict[str, Any]:
    """One turn: what both plans take, what of that was not expected, in percent, and the gain."""
    row: dict[str, Any] = {}
    memory, begun = [streaming(processes)], time.monotonic()
    profile(folder, processes, part)
    in_profile = watched.seconds(begun, time.monotonic())
    memory.append(streaming(processes))
    seconds = {}
    for method in ("none", "auto"):
        plan = planned(folder, method)
        run = folder / f"{method}-run"
        shutil.rmtree(run, ignore_errors=True)
        words = (folder / method / "plan.json", "--config", folder / "run.yaml", "-o", run)
        train = [program("pd-train"), *words, "--no-evaluate"]
        if part < 1:
            train = [*launcher(plan.workers), *limited(part), *train]
        begun = time.monotonic()
        subprocess.run(list(map(str, train)), check=True, stdout=subprocess.DEVNULL)
        slower = watched.seconds(begun, time.monotonic()) / in_profile
        memory.append(streaming(processes))
        seconds[method] = seconds_of(run)
        expected = plan.predicted.seconds_in_a_run
        row[method] = f"{seconds[method] * 1e3:.1f} ms"
        row[f"of {method}"] = round(100 * (seconds[method] / expected - 1), 1)
        row[f"{method} is"] = stages(plan)
    row["slower"] = round(100 * (slower - 1), 1)
    row["at its pace"] = round(100 * (seconds[method] / expected / slower - 1), 1)
    row["gain"] = round(seconds["none"] / seconds["auto"], 3)
    row["memory"] = " ".join(f"{each / 1e9:.1f}" for each in memory)
    return row


def planned(folder: Path, method: str) -> Plan:
    cluster = ("--cluster", folder / "network" / "cluster.yaml", "--intra-op", method)
    round_ = round_of(config_of(folder))
    call("pd-optimize", folder / "graph.txt", *cluster, *round_, "-o", folder / method)
    return read_plan(folder / method / "plan.json")


if __name__ == "__main__":
    main()

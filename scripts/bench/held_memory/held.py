"""Is what a plan says a process holds what it holds?

`python scripts/bench/held_memory/held.py [NAME ...]` profiles, plans and trains each model as a
user does (pd-profile, pd-optimize, pd-train), on two processes or more, and prints for each rank
what was planned and what was measured: the tensors, and what the process held.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
MOMENTUM = {"name": "SGD", "args": {"lr": 0.001, "momentum": 0.9}}
ADAM = {"name": "AdamW", "args": {"lr": 0.0001}}
OF = {"SGD": "momentum", "AdamW": "adam"}


@dataclass(frozen=True)
class Case:
    """A model, its data (a factory of held_models.py), and how it is planned and learns."""

    model: dict[str, Any]
    data: tuple[str, dict[str, Any]]
    batch_size: int
    optimizer: dict[str, Any]
    planned: tuple[str, ...] = ()
    loss: str = "cross_entropy"
    microbatches: int = 1
    minibatches: int = 16
    machines: str = "2"
    autocast: str | None = None

    def config(self) -> dict[str, Any]:
        factory, args = self.data
        args = args | {"examples": self.minibatches * self.batch_size}
        config: dict[str, Any] = {
            "format": "pipedream-run/1",
            "model": self.model,
            "data": {"source": f"held_models:{factory}", "args": args},
            "loss": self.loss,
            "optimizer": self.optimizer,
            "batch_size": self.batch_size,
            "microbatches": self.microbatches,
            "epochs": 1,
        }
        if self.autocast is not None:
            config["autocast"] = self.autocast
        return config


def _of(source: str, **args: Any) -> dict[str, Any]:
    return {"source": source, "args": args}


NEXT_WORD = "held_models:next_word"
_SMALL = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8}
CASES = {
    "resnet50, stashing": Case(
        _of("torchvision:resnet50", num_classes=10), ("images", {"size": 96}), 16, MOMENTUM
    ),
    "mobilenet_v3_large, flush": Case(
        _of("torchvision:mobilenet_v3_large", num_classes=10),
        ("images", {"size": 128}),
        16,
        MOMENTUM,
        ("--schedule", "flush", "--microbatches", "4"),
        microbatches=4,
    ),
    "vgg11_bn, stashing": Case(
        _of("torchvision:vgg11_bn", num_classes=10), ("images", {"size": 64}), 32, MOMENTUM
    ),
    "vit_small, 2bw": Case(
        _of("timm:vit_small_patch16_224", num_classes=10, depth=8),
        ("images", {"size": 224}),
        8,
        ADAM,
        ("--schedule", "2bw", "--microbatches", "4"),
        microbatches=4,
    ),
    "BERT, flush": Case(
        _of("transformers:bert", **_SMALL, intermediate_size=2048, vocab_size=4000),
        ("tokens", {"length": 128}),
        8,
        ADAM,
        ("--schedule", "flush", "--microbatches", "4"),
        NEXT_WORD,
        microbatches=4,
    ),
    "GPT-2, flush": Case(
        _of("transformers:gpt2", n_layer=6, n_embd=512, n_head=8, vocab_size=4000),
        ("tokens", {"length": 128}),
        16,
        ADAM,
        ("--schedule", "flush", "--microbatches", "4"),
        NEXT_WORD,
        microbatches=4,
    ),
    "Llama, flush": Case(
        _of("transformers:llama", **_SMALL, intermediate_size=1536, vocab_size=4000),
        ("tokens", {"length": 256}),
        4,
        ADAM,
        ("--schedule", "flush", "--microbatches", "4"),
        NEXT_WORD,
        microbatches=4,
    ),
    "MLP, stashing": Case(
        _of("held_models:mlp", width=2048, layers=8), ("vectors", {"width": 2048}), 256, MOMENTUM
    ),
    "LSTM, stashing": Case(
        _of("held_models:lstm"), ("tokens", {"length": 64}), 16, ADAM, loss=NEXT_WORD
    ),
    "resnet50, three": Case(
        _of("torchvision:resnet50", num_classes=10),
        ("images", {"size": 96}),
        8,
        MOMENTUM,
        ("--split", "layer3", "--replicas", "2,1"),
        machines="3",
    ),
    "MLP, ZeRO-1": Case(
        _of("held_models:mlp", width=2048, layers=8),
        ("vectors", {"width": 2048}),
        256,
        ADAM,
        ("--split", "8", "--replicas", "2,1", "--zero", "always"),
        machines="3",
    ),
    "MLP, replicas": Case(
        _of("held_models:mlp", width=2048, layers=8),
        ("vectors", {"width": 2048}),
        256,
        ADAM,
        ("--split", "8", "--replicas", "2,1", "--zero", "never"),
        machines="3",
    ),
    "swin_tiny, stashing": Case(
        _of("timm:swin_tiny_patch4_window7_224", num_classes=10),
        ("images", {"size": 224}),
        4,
        ADAM,
    ),
    "convnext_tiny, 2bw": Case(
        _of("timm:convnext_tiny", num_classes=10),
        ("images", {"size": 128}),
        8,
        ADAM,
        ("--schedule", "2bw", "--microbatches", "4"),
        microbatches=4,
    ),
    "resnet50, selective": Case(
        _of("torchvision:resnet50", num_classes=10),
        ("images", {"size": 96}),
        16,
        MOMENTUM,
        ("--memory", "800MB", "--recompute", "auto"),
    ),
    "GPT-2, bfloat16": Case(
        _of("transformers:gpt2", n_layer=4, n_embd=512, n_head=8, vocab_size=4000),
        ("tokens", {"length": 128}),
        8,
        ADAM,
        ("--schedule", "flush", "--microbatches", "4"),
        NEXT_WORD,
        microbatches=4,
        autocast="bfloat16",
    ),
    "MLP, mesh": Case(
        _of("held_models:mlp", width=2048, layers=8),
        ("vectors", {"width": 2048}),
        256,
        MOMENTUM,
        ("--mesh", "2"),
        machines="2,2",
    ),
}


def do(*command: object) -> None:
    """Runs a command as a user would. Exits with what it said if it fails."""
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [Path(sys.executable).with_name(str(command[0])), *map(str, command[1:])],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    if done.returncode:
        sys.exit(f"{command}: {done.stderr[-3000:]}")


def show(name: str, case: Case, folder: Path) -> None:
    """Prints a line for each rank."""
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(case.config()), encoding="utf-8")
    graph, plan = folder / "profile" / "graph.txt", folder / "plan"
    if not graph.exists():
        do("pd-profile", config, "-o", folder / "profile", "--warmup", 1, "--repeats", 1)
    bandwidth = ",".join(["10GB"] * len(case.machines.split(",")))
    cluster: tuple[str, ...] = ("--machines", case.machines, "--bandwidth", bandwidth)
    if "--split" not in case.planned:
        cluster += ("--straight",)
    more = ("--optimizer", OF[case.optimizer["name"]], *case.planned)
    do("pd-optimize", graph, *cluster, *more, "-o", plan)
    do("pd-train", plan / "plan.json", "--config", config, "--no-evaluate", "-o", folder / "run")
    stages = json.loads((plan / "plan.json").read_text())["stages"]
    print(name, flush=True)
    for rank in json.loads((folder / "run" / "summary.json").read_text())["ranks"]:
        planned, measured = rank["predicted_memory_bytes"], rank["peak_memory_bytes"]
        expected, held = rank["predicted_process_bytes"] or 0.0, rank["process_memory_bytes"]
        items = stages[rank["stage"]]["memory"]
        listed = ", ".join(f"{item} {size / 1e6:.1f}" for item, size in items.items())
        print(
            f"  rank {rank['rank']}: planned {planned / 1e6:7.1f} MB,"
            f" measured {measured / 1e6:7.1f} MB, {planned / measured - 1:+.1%};"
            f" process planned {expected / 1e6:7.1f} MB, held {held / 1e6:7.1f} MB,"
            f" {expected / held - 1:+.1%} ({listed})",
            flush=True,
        )


def main(names: list[str]) -> None:
    """Shows the cases whose names begin so, in this order; all without names."""
    chosen = [case for each in names or [""] for case in CASES if case.startswith(each)]
    for name in dict.fromkeys(chosen):
        with tempfile.TemporaryDirectory() as folder:
            show(name, CASES[name], Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])

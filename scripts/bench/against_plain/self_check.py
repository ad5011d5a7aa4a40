"""What does the self-check cost at the start of a run? `python self_check.py [MODEL]...`

GPT-2 (124 million parameters, sentences of 128 tokens) and ResNet-50 (pictures of 224 x 224), in
two stages on two processes of this machine, minibatches of 4: pd-train with the self-check and with
`--unchecked`, in turn, each for one minibatch. Prints the seconds of both and their difference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
MODELS = {
    "gpt2": ("transformers:gpt2", "self_check:sentences", "self_check:next_words"),
    "resnet50": ("torchvision:resnet50", "self_check:pictures", "cross_entropy"),
}
"""Each with its data and its loss."""
TURNS = 2


def sentences(examples: int = 4) -> tuple[object, None]:
    import torch
    from torch.utils.data import TensorDataset

    words = torch.randint(50_257, (examples, 129), generator=torch.Generator().manual_seed(0))
    return TensorDataset(words[:, :-1].clone(), words[:, 1:].clone()), None


def next_words(output: Any, target: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def pictures(examples: int = 4) -> tuple[object, None]:
    import torch
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, 3, 224, 224, generator=generator)
    return TensorDataset(x, torch.randint(1_000, (examples,), generator=generator)), None


def prepare(folder: Path, name: str) -> None:
    source, data, loss = MODELS[name]
    config = {
        "format": "pipedream-run/1",
        "model": {"source": source},
        "data": {"source": data},
        "loss": loss,
        "optimizer": {"name": "SGD", "args": {"lr": 0.001}},
        "batch_size": 4,
        "epochs": 1,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    _run(folder, "pd-profile", "run.yaml", "--repeats", "1", "-o", "profile")
    words = ("--machines", "2", "--bandwidth", "1GB", "--straight", "--schedule", "flush")
    _run(folder, "pd-optimize", "profile/graph.txt", *words, "-o", "plan")


def seconds(folder: Path, run: str, *options: str) -> float:
    begin = time.perf_counter()
    _run(folder, "pd-train", "plan/plan.json", "--config", "run.yaml", "-o", run, *options)
    return time.perf_counter() - begin


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(
        command, cwd=folder, env=_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}


def main() -> None:
    found = {}
    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            prepare(folder, name)
            turns = [
                (seconds(folder, f"{k}"), seconds(folder, f"{k}-unchecked", "--unchecked"))
                for k in range(TURNS)
            ]
        checked, unchecked = map(min, zip(*turns, strict=True))
        found[name] = {"checked": checked, "unchecked": unchecked}
        told = f"{checked:.1f} s with the self-check, {unchecked:.1f} s without"
        print(
            f"{name}: a run of one minibatch takes {told}: {checked - unchecked:.1f} s", flush=True
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()

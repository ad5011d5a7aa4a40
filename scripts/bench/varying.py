"""What do minibatches of varying length cost? `python scripts/bench/varying.py [PAIRS]`

Two runs of pd-train on two processes of this machine, in turns: minibatches of eight lengths, and
minibatches that all have the mean of these, so that both compute on as many tokens. The model works
token by token, so that its time is in proportion to them. The ratio of the times of all epochs
after the first, in which each length is captured; its median over the pairs.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import pipedream

LENGTHS = (16, 32, 48, 64, 80, 96, 112, 128)
BATCH, EPOCHS, EXAMPLES, WIDTH = 4, 4, 256, 256
PLAN = "plan"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


def model() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(4)))


def data() -> TensorDataset:
    """The number of an example is its first value."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, max(LENGTHS), WIDTH, generator=draw)
    return TensorDataset(x, torch.arange(EXAMPLES))


def several(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Of the eight lengths in turn, over the numbers of the first examples of minibatches."""
    x = torch.stack([each for each, _ in examples])
    length = LENGTHS[int(examples[0][1]) // BATCH % len(LENGTHS)]
    return x[:, :length], x[:, :length]


def mean(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x = torch.stack([each for each, _ in examples])
    length = sum(LENGTHS) // len(LENGTHS)
    return x[:, :length], x[:, :length]


def seconds(folder: Path, collate: str) -> float:
    """Of all epochs but the first."""
    config = {
        "format": "pipedream-run/1",
        "model": {"source": "varying:model"},
        "data": {
            "source": "varying:data",
            "collate": f"varying:{collate}",
            "varying": collate == "several",
        },
        "sampler": {"source": "torch.utils.data:SequentialSampler"},
        "loss": "mse_loss",
        "optimizer": {"name": "SGD", "args": {"lr": 1e-3}},
        "batch_size": BATCH,
    }
    (folder / f"{collate}.yaml").write_text(json.dumps(config))
    command = ["pd-train", f"{PLAN}/plan.json", "--config", f"{collate}.yaml", "-o", collate]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--epochs", str(EPOCHS)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = (folder / collate / "metrics.jsonl").read_text().splitlines()
    ends = {line["epoch"]: line["seconds"] for line in map(json.loads, lines)}
    shutil.rmtree(folder / collate)
    return ends[EPOCHS] - ends[1]


def main() -> None:
    pairs = int(sys.argv[1]) if sys.argv[1:] else 5
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profiled = pipedream.profile(model(), torch.randn(BATCH, sum(LENGTHS) // 8, WIDTH))
        plan = pipedream.optimize(profiled, 2, "10GB/s", straight=True)
        plan.write(folder / PLAN)
        for number in range(pairs):
            order = ("several", "mean") if number % 2 else ("mean", "several")
            times = {collate: seconds(folder, collate) for collate in order}
            ratios.append(times["several"] / times["mean"])
            print(f"{times}  ratio {ratios[-1]:.3f}", flush=True)
    print(f"varying over one length, median of {pairs}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()

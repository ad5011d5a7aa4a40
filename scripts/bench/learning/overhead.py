"""What a correction costs in time: `python scripts/bench/learning/overhead.py [--examples N] ...`

Models of 4 stages learn in turns, an update of each after the other, from minibatches of so many
windows of 64 bytes; a line for each method: the median of its updates over that of AdamW's, all
passes included. What the products of Muon and of rotated bases cost depends on the size of
matrices and on the tokens of an update alone: (m + n) / tokens of a linear layer's time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from statistics import median

import torch
from late_model import CPU, LateModel
from methods import CONFIGS, METHODS, config_of

from pipedream.runtime.data.reader import Epoch

AGAINST = "stashing AdamW"
RATES = (1e-3, 1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--updates", type=int, default=40)
    asked = parser.parse_args()
    sys.path.insert(0, str(CONFIGS))
    torch.set_num_threads(1)
    names = [AGAINST, *(name for name in METHODS if "stashing" in name and name != AGAINST)]
    for examples in asked.examples:
        took = seconds(names, examples, asked.width, asked.updates)
        for name in names:
            over = took[name] / took[AGAINST] - 1
            print(f"{examples * 64:>7} tokens  {name:24} {over:+.1%}", flush=True)


def seconds(names: list[str], examples: int, width: int, updates: int) -> dict[str, float]:
    """Returns the median seconds of an update."""
    learning = {name: _updates(name, examples, width) for name in names}
    took: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(updates):
        for name, model in learning.items():
            begun = time.perf_counter()
            next(model)
            took[name].append(time.perf_counter() - begun)
    return {name: median(each[updates // 4 :]) for name, each in took.items()}


def _updates(name: str, examples: int, width: int) -> Iterator[float]:
    method = METHODS[name]
    config = config_of(method, 4, RATES[: method.groups], seed=0)
    sizes = config.model.model_copy(update={"args": config.model.args | {"width": width}})
    config = config.model_copy(update={"batch_size": examples, "model": sizes})
    model = LateModel(config, method.schedule, 4)
    epoch = Epoch(model.training, config, 1, CPU)
    for stage in model.stages:
        stage.begin_epoch()
    for update in range(model.updates):
        yield model.learn(update, epoch)


if __name__ == "__main__":
    main()

"""Who reaches a loss sooner? `python scripts/bench/learning/time_to_loss.py LEARNING EMULATED`

LEARNING is a folder of learning.py, EMULATED one of
`scripts/bench/emulated/emulate.py --plans dp,flush-even,2bw-even`, whose plans pd-optimize chose
for data parallelism, for a flush and for 2BW with as many minibatches to an update. From the one
come updates to a loss (of the training text, each part seen for the first time in the first epoch;
the mean of `SMOOTH` updates), with and without late gradients, from the other seconds of an update.
A line for each model, optimizer and loss: by what factor 2BW is there sooner than the better of the
two others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

SMOOTH = 100
"""Updates whose losses are averaged."""

PAIRS = {
    "AdamW": ("flush AdamW", "2bw AdamW feedback"),
    "Muon": ("flush Muon", "2bw Muon feedback"),
}

SHARES = (0.5, 0.8, 0.9, 1.0)
"""Losses to be reached: after these parts of the updates of the late run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("learning", type=Path)
    parser.add_argument("emulated", type=Path)
    parser.add_argument("--stages", type=int, default=8)
    asked = parser.parse_args()
    table = pd.read_csv(asked.learning / "learning.csv")
    took = seconds(asked.emulated / "results.jsonl")
    rows = []
    for optimizer, pair in PAIRS.items():
        known = [curve(table, asked.learning, name, asked.stages) for name in pair]
        if all(len(each) for each in known):
            rows += compared(optimizer, *known, took)
    print(pd.DataFrame(rows).to_string(index=False))


def seconds(path: Path) -> dict[tuple[str, str], dict[str, float]]:
    """Returns median seconds of a minibatch as measured, of each plan, by model and cluster."""
    frame = pd.DataFrame(map(json.loads, path.read_text().splitlines()))
    return {
        (str(model), str(cluster)): (runs.groupby("plan").measured_ms.median() / 1e3).to_dict()
        for (model, cluster), runs in frame.groupby(["profile", "cluster"])
    }


def curve(table: pd.DataFrame, folder: Path, method: str, stages: int) -> Sequence[float]:
    """Returns the losses of updates, the mean over seeds; none if the method was not tried."""
    rows = table[(table.method == method) & (table.stages == stages)]
    files = [
        folder / f"{method}-{stages}-{row.epochs}-{row.rates}-{row.seed}.json".replace(" ", "-")
        for row in rows.itertuples()
    ]
    losses = [json.loads(file.read_text())["losses"] for file in files]
    if not losses:
        return []
    return np.convolve(np.mean(losses, axis=0), np.ones(SMOOTH) / SMOOTH, mode="valid").tolist()


def compared(
    optimizer: str,
    timely: Sequence[float],
    late: Sequence[float],
    took: Mapping[tuple[str, str], Mapping[str, float]],
) -> list[dict[str, object]]:
    best = np.minimum.accumulate(late)
    rows: list[dict[str, object]] = []
    for (model, cluster), plans in took.items():
        plain = min(plans["dp"], plans["flush-even"])
        for share in SHARES:
            loss = best[round(share * len(best)) - 1]
            updates = [int(np.argmax(np.asarray(each) <= loss)) + SMOOTH for each in (timely, late)]
            times = updates[0] * plain, updates[1] * plans["2bw-even"]
            rows.append(
                {
                    "model": model,
                    "cluster": cluster,
                    "optimizer": optimizer,
                    "loss": round(float(loss), 3),
                    "updates": updates[0],
                    "late": updates[1],
                    "dp, flush, 2bw s": " ".join(
                        f"{plans[each]:.3g}" for each in ("dp", "flush-even", "2bw-even")
                    ),
                    "sooner": round(times[0] / times[1], 2),
                }
            )
    return rows


if __name__ == "__main__":
    main()

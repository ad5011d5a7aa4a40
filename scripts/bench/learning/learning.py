"""What late gradients cost, and what corrects them:

    python scripts/bench/learning/learning.py [--stages 4,8,16,32] [--seeds 3] [--epochs 2]
        [--workers 1] [-o FOLDER] [METHOD]...

Trains a byte-level GPT on the text of Python's help topics (configs/topics_gpt.py), a block for
each stage, by each method of `methods.py`, in one process as a pipeline would (`late_model.py`).
For each number of stages and method the learning rate is found first: from the middle of the grid,
which is the same for all, or from the best rate with fewer stages, to the best of neighbours, with
the first seed; then the other seeds train at that rate. So all have made as many updates from the
same samples, and what differs is how late the gradients came, and what was done about it.

Runs that are there already are not made again, nor those in known.csv, which holds what was found
so far: at 32 stages a run takes half an hour of a core. New ones are added to it. Writes
learning.csv and learning.svg to the folder, and prints a table: the held-out loss over that of the
same optimizer whose gradients are not late, seed by seed: the median, and the range.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).parent))
from methods import CONFIGS, GRID, METHODS, config_of
from picture import draw

MIDDLE = 3
KNOWN = Path(__file__).with_name("known.csv")
"""The held-out losses of runs, wherever they were made."""
KEY = ["method", "stages", "epochs", "rates", "seed"]


@dataclass(frozen=True)
class Run:
    """One run, whose held-out loss is in a file of its own in `folder`."""

    folder: Path
    method: str
    stages: int
    rates: tuple[float, ...]
    seed: int
    epochs: int

    @property
    def key(self) -> tuple[object, ...]:
        return self.method, self.stages, self.epochs, show_rates(self.rates), self.seed

    @property
    def file(self) -> Path:
        rates = show_rates(self.rates)
        name = f"{self.method}-{self.stages}-{self.epochs}-{rates}-{self.seed}"
        return self.folder / f"{name.replace(' ', '-')}.json"

    def loss(self) -> float:
        """Returns the held-out loss, in nats a byte; infinite if it does not learn. Trains, if
        nobody has.
        """
        if not self.file.exists():
            known = known_losses().get(self.key)
            if known is not None:
                return known
            self._train()
        found = json.loads(self.file.read_text())["held_out_loss"]
        return math.inf if found is None else float(found)

    def _train(self) -> None:
        from late_model import LateModel

        method, begun = METHODS[self.method], time.perf_counter()
        config = config_of(method, self.stages, self.rates, self.seed, self.epochs)
        model = LateModel(config, method.schedule, self.stages)
        losses = model.train()
        loss = model.evaluate() if len(losses) == model.updates * self.epochs else math.inf
        told = {
            **{name: value for name, value in asdict(self).items() if name != "folder"},
            "held_out_loss": loss if math.isfinite(loss) else None,
            "losses": [round(each, 5) for each in losses],
            "seconds": time.perf_counter() - begun,
        }
        self.file.write_text(json.dumps(told))


@dataclass(frozen=True)
class Study:
    """One method at one number of stages. `fewer`: the same with fewer stages."""

    folder: Path
    method: str
    stages: int
    seeds: int
    epochs: int
    fewer: Study | None

    def run(self, places: tuple[int, ...], seed: int) -> Run:
        rates = tuple(GRID[each] for each in places)
        return Run(self.folder, self.method, self.stages, rates, seed, self.epochs)

    def tuned(self) -> tuple[int, ...]:
        """Returns the places in the grid of the best learning rates: uphill from the middle, or
        from the best with fewer stages, as long as a neighbour is better; down, where nothing
        learns.
        """
        middle = (MIDDLE,) * METHODS[self.method].groups
        best = middle if self.fewer is None else self.fewer.tuned()
        while True:
            near = [best, *neighbours(best)]
            found = min(near, key=lambda each: (self.run(each, 0).loss(), sum(each)))
            if found == best:
                return best
            best = found

    def rows(self) -> list[dict[str, object]]:
        """Returns a row for each seed, at the best rates."""
        places = self.tuned()
        told = {
            "method": self.method,
            "stages": self.stages,
            "epochs": self.epochs,
            "rates": show_rates(self.run(places, 0).rates),
            "edge": any(each in (0, len(GRID) - 1) for each in places),
        }
        runs = {seed: self.run(places, seed) for seed in range(self.seeds)}
        return [{**told, "seed": seed, "loss": run.loss()} for seed, run in runs.items()]


@cache
def known_losses() -> dict[tuple[object, ...], float]:
    """Returns those of known.csv by `KEY`."""
    if not KNOWN.exists():
        return {}
    table = pd.read_csv(KNOWN, dtype={"rates": str})
    return dict(zip(table[KEY].itertuples(index=False, name=None), table.loss, strict=True))


def note(folder: Path) -> None:
    """Adds the runs in the folder to known.csv."""
    found = known_losses().copy()
    for file in folder.glob("*.json"):
        told = json.loads(file.read_text())
        of_run = (told[name] for name in ("method", "stages", "rates", "seed", "epochs"))
        run = Run(folder, *of_run)
        found[run.key] = round(run.loss(), 5)
    rows = [(*key, loss) for key, loss in found.items()]
    table = pd.DataFrame(rows, columns=[*KEY, "loss"]).sort_values(
        ["stages", "method", "rates", "seed"]
    )
    table.to_csv(KNOWN, index=False)


def neighbours(places: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns those that differ by one step in one rate."""
    moved = [
        (*places[:index], place + step, *places[index + 1 :])
        for index, place in enumerate(places)
        for step in (-1, 1)
    ]
    return [each for each in moved if all(0 <= place < len(GRID) for place in each)]


def show_rates(rates: Iterable[float]) -> str:
    return "+".join(f"{rate:g}" for rate in rates)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", metavar="METHOD")
    parser.add_argument("--stages", default="4,8,16,32")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/learning"))
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    asked.output.mkdir(parents=True, exist_ok=True)
    studies: list[Study] = []
    last: dict[str, Study] = {}
    for stages in sorted(map(int, asked.stages.split(","))):
        for method in asked.methods or METHODS:
            fewer = last.get(method)
            study = Study(asked.output, method, stages, asked.seeds, asked.epochs, fewer)
            studies.append(study)
            last[method] = study
    with multiprocessing.get_context("spawn").Pool(asked.workers, initializer=_prepare) as pool:
        table = pd.DataFrame(row for rows in shown(pool.imap(rows_of, studies)) for row in rows)
    note(asked.output)
    table = against_plain(table)
    table.to_csv(asked.output / "learning.csv", index=False)
    draw(curves_of(table, asked.output), asked.output / "learning.svg")
    print(summary(table).to_string(index=False))


def _prepare() -> None:
    import torch

    torch.set_num_threads(1)
    sys.path[:0] = [str(CONFIGS), str(Path(__file__).parent)]


def rows_of(study: Study) -> list[dict[str, object]]:
    return study.rows()


def shown(found: Iterable[list[dict[str, object]]]) -> Iterable[list[dict[str, object]]]:
    """Yields what is found, a line for each on the way."""
    for rows in found:
        first = rows[0]
        losses = " ".join(f"{row['loss']:.4f}" for row in rows)
        print(f"{first['stages']:>3} {first['method']:24} {first['rates']:18} {losses}", flush=True)
        yield rows


def curves_of(table: pd.DataFrame, folder: Path) -> dict[int, dict[str, list[float]]]:
    """Returns the losses of the first seed of each method, by number of stages."""
    curves: dict[int, dict[str, list[float]]] = {}
    for row in table[table.seed == 0].itertuples():
        rates = tuple(float(rate) for rate in str(row.rates).split("+"))
        run = Run(folder, str(row.method), int(row.stages), rates, 0, int(row.epochs))
        if not run.file.exists():  # made elsewhere
            continue
        losses = json.loads(run.file.read_text())["losses"]
        curves.setdefault(run.stages, {})[run.method] = losses
    return curves


def against_plain(table: pd.DataFrame) -> pd.DataFrame:
    """Adds `over`: by what part a loss is above that of the plain method, seed by seed."""
    keys = ["stages", "epochs", "seed"]
    known = table.set_index([*keys, "method"]).loss
    plain = [
        known.get((*(row[key] for key in keys), METHODS[str(row.method)].plain), math.nan)
        for _, row in table.iterrows()
    ]
    return table.assign(over=table.loss / plain - 1)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A line for each method, with the median loss and the median and range of `over` for each
    number of stages.
    """
    rows = []
    for (method, stages), runs in table.groupby(["method", "stages"], sort=False):
        over = runs.over.sort_values()
        rows.append(
            {
                "method": method,
                "stages": stages,
                "rates": f"{runs.rates.iloc[0]}{'!' * bool(runs.edge.iloc[0])}",
                "loss": f"{runs.loss.median():.4f}",
                "over": f"{over.median():+.1%}",
                "range": f"{over.min():+.1%} to {over.max():+.1%}",
            }
        )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    main()

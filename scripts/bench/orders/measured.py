"""Do orders of passes gain what they should? `python scripts/bench/orders/measured.py [MODEL]...`

For each model (mlp, gpt: divided.py), on two processes of one thread each, with rounds of M
microbatches: pd-train's engine with 1f1b, zb-h1 and auto on two stages, with interleaved on four in
a loop, with zb-v and auto on four in a V; torch.distributed.pipelining's own Schedule1F1B,
ScheduleInterleaved1F1B and ScheduleZBVZeroBubble on the same stages, with the same minibatch, loss
and optimizer, all in float32. Columns:

- ms: of a round, from the end of one to the end of the next, on the rank where that takes longer
- simulated: the same for the seconds that each pass, send and update of these rounds took, and
  what messages take from the end of a pass until who waits for them has them, if nothing else takes
  time; `auto` is found for the times of zb-h1 and of zb-v
- of 1f1b: both in parts of those of 1f1b on two stages
- gained: the speed-up over 1f1b, in parts of the simulated one
- torch: ms of its own schedule of this name, ours in parts of it, and the same of what a tenth of
  the rounds do not exceed, which others on the machine have slowed least

The same two processes do all of it in turns of a few rounds, over and over, those of the same M one
after the other: what slows the machine for a while slows all of it. The first round of a turn does
not count. Medians; parts are those of turns that were near each other. Three minutes for a model.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from divided import MODELS, captured_model, planned
from ours import Clocked, Ours, pass_times, played
from theirs import SCHEDULES, Theirs

from pipedream.capture.compute_settings import keep_freed_memory
from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.schedule.orders.literature import loop, vee
from pipedream.schedule.spec import PassTimes, PipelineSpec

MICROBATCHES = (2, 4, 8)
ROUNDS = 3
"""Of a turn."""
SECONDS = 150.0
"""Of all turns of a model."""
SAME_LOSS = 1e-4
"""In parts of it."""

MAPS = {"chain": loop(2, 1), "loop": loop(2, 2), "vee": vee(2, 2)}


class Contender(NamedTuple):
    order: str
    stages: str

    def __str__(self) -> str:
        return f"{self.order} {self.stages}"


FIRST = Contender(DEFAULT_ORDER, "chain")
OURS = (
    FIRST,
    Contender("zb-h1", "chain"),
    Contender("auto", "chain"),
    Contender("interleaved", "loop"),
    Contender("zb-v", "vee"),
    Contender("auto", "vee"),
)
MEASURED_FOR_AUTO = {"chain": "zb-h1", "vee": "zb-v"}


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            mp.spawn(work, (name, folder), nprocs=2)
            table = pd.DataFrame(json.loads((Path(folder) / "rows.json").read_text()))
        print(name)
        print(table.to_string(index=False, float_format="%.3f", na_rep=""), flush=True)


def work(rank: int, name: str, folder: str) -> None:
    """One process: all turns. The first writes down what they come to."""
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    bench = Bench(name, rank, Path(folder))
    bench.warm_up()
    bench.measure()
    rows = bench.rows()
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


Turn = tuple[str, int]
"""A contender, or the name of one of torch's, and M."""


class Bench:
    """One of the two processes. `rounds`: the seconds of those of each turn, and `numbers` of
    turns, as `Clocked` counts them.
    """

    def __init__(self, name: str, rank: int, folder: Path) -> None:
        captured = captured_model(name)
        plans = {
            each.stages: planned(MODELS[name], captured, each.order, MAPS[each.stages])
            for each in OURS
            if each.order not in ("auto", DEFAULT_ORDER)
        }
        self.ours = {stages: Ours(name, rank, folder, plan) for stages, plan in plans.items()}
        first = self.ours["chain"]
        self.theirs = {
            each.order: Theirs(
                name,
                rank,
                each.order,
                MAPS[each.stages],
                first.batch,
                first.local.loss,
                MICROBATCHES,
            )
            for each in OURS
            if each.order in SCHEDULES
        }
        self.times: dict[str, PassTimes] = {}
        self.turns: dict[Turn, Callable[[int], list[float]]] = {}
        self.rounds: dict[Turn, list[list[float]]] = defaultdict(list)
        self.numbers: dict[Turn, list[int]] = defaultdict(list)

    def warm_up(self) -> None:
        """A turn of each; that of auto once the passes of the others are timed."""
        for known in (False, True):
            if known:
                self._time_for_auto()
            for each in OURS:
                if (each.order == "auto") is known:
                    self._add_ours(each)
        for order in self.theirs:
            self._add_theirs(order)
        for turn in self.turns.values():
            turn(1)
        self._check_losses()
        for ours in self.ours.values():
            ours.clocked.clear()

    def _time_for_auto(self) -> None:
        for stages, order in MEASURED_FOR_AUTO.items():
            ours, spec = self.ours[stages], self._spec(Contender(order, stages), 4)
            for _ in range(4):
                ours.rounds(spec, ROUNDS)
            self.times[stages] = pass_times(ours.of_all_stages(order), spec)

    def _spec(self, each: Contender, microbatches: int) -> PipelineSpec:
        times = self.times.get(each.stages) if each.order == "auto" else None
        return self.ours[each.stages].spec(each.order, microbatches, times)

    def _add_ours(self, each: Contender) -> None:
        for m in MICROBATCHES:
            spec = self._spec(each, m)
            self.turns[str(each), m] = lambda rounds, spec=spec: (  # type: ignore[misc]
                self.ours[each.stages].rounds(spec, rounds)
            )

    def _add_theirs(self, order: str) -> None:
        for m in MICROBATCHES:
            self.turns[f"torch {order}", m] = lambda rounds, m=m: (  # type: ignore[misc]
                self.theirs[order].rounds(m, rounds)
            )

    def _check_losses(self) -> None:
        """All train the same model on the same data, so all have the same loss."""
        losses = [loss for ours in self.ours.values() for loss in ours.losses]
        losses += [loss.item() for theirs in self.theirs.values() for loss in theirs.losses]
        assert max(losses) - min(losses) < SAME_LOSS * max(losses), losses

    def measure(self) -> None:
        """Turns until the time is up; the first process says when."""
        end = time.monotonic() + SECONDS
        turns = sorted(self.turns.items(), key=lambda item: item[0][1])
        contenders = {str(each): each for each in OURS}
        while self._agreed(time.monotonic() < end):
            for key, turn in turns:
                own, both = turn(ROUNDS), [[0.0], [0.0]]
                dist.all_gather_object(both, own)
                self.rounds[key].append([max(pair) for pair in zip(*both, strict=True)])
                if key[0] in contenders:
                    each = contenders[key[0]]
                    number = self.ours[each.stages].clocked[each.order].turn
                    self.numbers[key].append(number)

    @staticmethod
    def _agreed(goes_on: bool) -> bool:
        answers = [goes_on]
        dist.broadcast_object_list(answers)
        return answers[0]

    def rows(self) -> list[dict[str, Any]]:
        """Of the table. Every rank calls it."""
        found = {each: self.ours[each.stages].of_all_stages(each.order) for each in OURS}
        rows = []
        for m in MICROBATCHES:
            first = self._simulated(FIRST, m, found[FIRST])
            rows += [self._row(e, m, self._simulated(e, m, found[e]), first) for e in OURS]
        return rows

    def _simulated(self, each: Contender, m: int, clocked: Clocked) -> list[list[float]]:
        spec = self._spec(each, m)
        return [played(clocked, spec, number, ROUNDS) for number in self.numbers[str(each), m]]

    def _row(
        self, each: Contender, m: int, simulated: list[list[float]], first: list[list[float]]
    ) -> dict[str, Any]:
        own, theirs = self.rounds[str(each), m], self.rounds.get((f"torch {each.order}", m))
        gained, expected = _parts(own, self.rounds[str(FIRST), m]), _parts(simulated, first)
        return {
            "M": m,
            "order": each.order,
            "stages": each.stages,
            "ms": 1e3 * float(np.median(own)),
            "simulated": 1e3 * float(np.median(simulated)),
            "of 1f1b": gained,
            "simulated of 1f1b": expected,
            "gained": expected / gained,
            "torch": None if theirs is None else 1e3 * float(np.median(theirs)),
            "of torch": None if theirs is None else _parts(own, theirs),
            "fast": None if theirs is None else _fast(own) / _fast(theirs),
        }


def _parts(turns: list[list[float]], of: list[list[float]]) -> float:
    """The median over pairs of turns that were near each other."""
    pairs = zip(turns, of, strict=True)
    return float(np.median([np.mean(one) / np.mean(other) for one, other in pairs]))


def _fast(turns: list[list[float]]) -> float:
    return float(np.quantile(turns, 0.1))


if __name__ == "__main__":
    main()

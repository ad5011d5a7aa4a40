"""What does pd-train cost on one worker? `python scripts/bench/one_worker.py [MODEL]...`

The plain model's training loop and pd-train's engine with a plan of one stage, in turns in one
process, on the GPU if there is one, else on one core: the models of efficiency.py.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from efficiency import MODELS, Same, Still, engine_of, plain_loop, prepare, rank_of

from pipedream.capture.compute_settings import keep_freed_memory
from pipedream.comm.rank_info import RankInfo
from pipedream.runtime.run.action_stream import ActionStream
from pipedream.runtime.run.training_segment import TrainingSegment

TURNS = 9
MINIBATCHES = 10


class Bench:
    def __init__(self, folder: Path, device: str) -> None:
        self.rank = rank_of(folder, RankInfo(0, 1, 0, 1, "127.0.0.1", 0), device)
        self.batch = self.rank.examples.epoch(1).batch(0)
        self.plain = plain_loop(self.rank, self.batch)

    def loop(self) -> None:
        for _ in range(MINIBATCHES):
            self.plain()

    def engine(self) -> None:
        actions = ActionStream(TrainingSegment(0, MINIBATCHES), self.rank.actions(MINIBATCHES))
        engine_of(self.rank, Still()).run(actions, Same(self.batch))

    def pair(self) -> tuple[float, float]:
        """Seconds per minibatch of the plain loop and of the engine."""
        return self._seconds(self.loop), self._seconds(self.engine)

    def _seconds(self, turn: Callable[[], None]) -> float:
        self._settle()
        begin = time.perf_counter()
        turn()
        self._settle()
        return (time.perf_counter() - begin) / MINIBATCHES

    def _settle(self) -> None:
        if self.rank.device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    keep_freed_memory()
    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            prepare(name, Path(folder), stages=1)
            bench = Bench(Path(folder), "cuda" if torch.cuda.is_available() else "cpu")
            pairs = [bench.pair() for _ in range(TURNS + 1)][1:]  # the first is to warm up
        show(name, pairs)


def show(name: str, pairs: list[tuple[float, float]]) -> None:
    loops, engines = zip(*pairs, strict=True)
    print(
        f"{name}: plain loop {statistics.median(loops) * 1e3:.2f} ms per minibatch, pd-train",
        end=" ",
    )
    print(f"{statistics.median(engines) * 1e3:.2f} ms; ratio", end=" ")
    print(f"{statistics.median(after / before for before, after in pairs):.3f}", end="")
    print(f", of the shortest times {min(engines) / min(loops):.3f}", flush=True)


if __name__ == "__main__":
    main()

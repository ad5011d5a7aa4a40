"""What does pd-train cost on one worker? `python scripts/bench_one_worker.py [MODEL]...`

The plain model's training loop and pd-train's engine with a plan of one stage, in turns in one
process, on the GPU if there is one, else on one core: the models of bench_runtime.py.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_runtime import MODELS, Same, Still, engine_of, prepare

from pipedream.graph.config import read_config
from pipedream.graph.heap import keep_freed_memory
from pipedream.graph.plan import read_plan
from pipedream.profiler.source import load_config_model
from pipedream.runtime.job import Job
from pipedream.runtime.launch import Place
from pipedream.runtime.optimizers import make_optimizer
from pipedream.runtime.rank import Rank
from pipedream.runtime.schedule import schedule
from pipedream.runtime.weights import Weights

TURNS = 9
MINIBATCHES = 10


class Bench:
    def __init__(self, folder: Path) -> None:
        plan, config = read_plan(folder / "plan/plan.json"), read_config(folder / "run.yaml")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        job = Job(plan, config, folder, folder / "run", device=device)
        self.rank = Rank(job, Place(0, 1, 0, 1, "127.0.0.1", 0))
        self.rank.weights = Weights(self.rank.parameters)
        self.rank.stepping = self.rank.make_stepping(lambda tensor: None)
        self.batch = self.rank.examples.epoch(1).batch(0)
        torch.manual_seed(0)
        self.plain = load_config_model(config, folder).to(self.rank.device)
        self.optimizer = make_optimizer(config.optimizer, dict(self.plain.named_parameters()))

    def loop(self) -> None:
        for _ in range(MINIBATCHES):
            self.rank.loss(self.plain(*self.batch.inputs), self.batch.target).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def engine(self) -> None:
        actions = schedule("weight-stashing", (1,), [], MINIBATCHES).actions((0, 0))
        engine_of(self.rank, Still()).run(actions, Same(self.batch))

    def seconds(self, turn: str) -> float:
        self._settle()
        begin = time.perf_counter()
        getattr(self, turn)()
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
            bench = Bench(Path(folder))
            pairs = [(bench.seconds("loop"), bench.seconds("engine")) for _ in range(TURNS + 1)][1:]
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

"""How near does pd-train come to what it could be? `python scripts/bench/efficiency.py [MODEL]...`

For each model (mlp, vgg, gpt: models.py), on two processes of one thread each:

- efficiency: the slower stage's forward, backward and update, alone on its worker, over the time
  per minibatch of the pipeline with weight stashing; once with the other worker idle and once with
  both at work, neither of them sending anything, which shows what they take from each other;
- two workers: the plain model's training loop in one process over the pipeline;
- torch: samples per second over those of torch.distributed.pipelining's Schedule1F1B on the same
  split, with M microbatches per update, for weight stashing and for flush; and what the share that
  its flush leaves idle allows, (M + 1) / M.

The same two processes do all of it in turns, a few seconds each, over and over: what slows the
machine for a while slows all of it. The first two ratios are of medians over the minibatches of a
turn, the last of means over whole turns. Medians over the rounds. Four minutes for each model.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from torch.distributed.pipelining import Schedule1F1B, pipeline

from pipedream.capture.compute_settings import keep_freed_memory
from pipedream.capture.sources.load import load_config_model
from pipedream.comm.messages import Message
from pipedream.comm.rank_info import RankInfo
from pipedream.comm.stage_groups import StageGroups
from pipedream.comm.transport import TensorSpec, Transport
from pipedream.graph.choices import ScheduleName
from pipedream.graph.plan import read_plan
from pipedream.graph.run_config import read_config
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.engine.engine import Engine
from pipedream.runtime.engine.executor import Executor
from pipedream.runtime.engine.first_passes import MadeUpMessages
from pipedream.runtime.local.local_model import LocalModel
from pipedream.runtime.optim.optimizers import make_optimizer
from pipedream.runtime.optim.rates import LossSum
from pipedream.runtime.optim.stepping import Stepping
from pipedream.runtime.optim.weights import Weights
from pipedream.runtime.pipelining import split_policy
from pipedream.runtime.run.action_stream import ActionStream
from pipedream.runtime.run.job import Job
from pipedream.runtime.run.training_segment import TrainingSegment
from pipedream.runtime.stages.partition import links
from pipedream.schedule.action import Kind
from pipedream.schedule.channel import Channel
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PipelineSpec

ROUNDS = 9
LONG, FILLING = 16, 4
"""Minibatches of a turn, and how many at its beginning do not count, nor as many at its end."""
UPDATES = 3
MICROBATCHES = (2, 4, 8)

STILL = 1e-9
"""A learning rate at which the weights stay what they are: the messages made up for a stage alone
would make them grow without bound, and one minibatch again and again brings the gradients to
denormal numbers, which take several times as long.
"""

MODELS: dict[str, dict[str, Any]] = {
    "mlp": {
        "model": {"source": "models:mlp"},
        "data": {"source": "models:mlp_data"},
        "loss": "mse_loss",
        "optimizer": {"name": "SGD", "args": {"lr": STILL, "momentum": 0.9}},
        "batch_size": 256,
    },
    "vgg": {
        "model": {"source": "models:vgg"},
        "data": {"source": "models:vgg_data"},
        "loss": "cross_entropy",
        "optimizer": {"name": "SGD", "args": {"lr": STILL, "momentum": 0.9}},
        "batch_size": 16,
    },
    "gpt": {
        "model": {
            "source": "models:gpt",
            "args": {"length": 64, "width": 256, "layers": 4, "dropout": 0.0},
        },
        "data": {"source": "models:gpt_data", "args": {"length": 64}},
        "loss": "models:gpt_loss",
        "optimizer": {"name": "AdamW", "args": {"lr": STILL}},
        "batch_size": 16,
    },
}


def main() -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            prepare(name, Path(folder))
            mp.spawn(work, (folder,), nprocs=2)
            rounds = pd.DataFrame(json.loads((Path(folder) / "rounds.json").read_text()))
        show(name, rounds)


def prepare(name: str, folder: Path, stages: int = 2) -> None:
    """The config, and a plan of so many stages made by pd-profile and pd-optimize."""
    config = {"format": "pipedream-run/1", **MODELS[name]}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    call("pd-profile", folder / "run.yaml", "-o", folder, "--repeats", 10)
    options = ("--machines", stages, "--bandwidth", "5GB", "--straight", "--export", "torch")
    call("pd-optimize", folder / "graph.txt", *options, "-o", folder / "plan")


def call(program: str, *arguments: object) -> None:
    command = [Path(sys.executable).with_name(program), *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Still(MadeUpMessages):
    """Brings at once what the stage needs, the same each time, and sends nothing."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.messages: dict[Channel, Message] = {}

    def post(self, parts: Mapping[Channel, Sequence[TensorSpec]]) -> None:
        for channel, values in parts.items():
            if channel not in self.messages:
                self.messages[channel] = [
                    torch.randn(tuple(v.shape)).to(v.dtype) * 0.01 for v in values
                ]

    def receive(self, channel: Channel) -> Message:
        return [tensor.detach() for tensor in self.messages[channel]]


class Same:
    """The same minibatch again and again: what is measured here is not how data are read."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def inputs(self, minibatch: int, which: Iterable[int]) -> list[torch.Tensor]:
        return [self.batch.inputs[position] for position in which]

    def target(self, minibatch: int) -> Any:
        return self.batch.target


def rank_of(folder: Path, rank_info: RankInfo, device: str = "cpu") -> LocalModel:
    """Ready to train the plan that `prepare` has made."""
    plan, config = read_plan(folder / "plan/plan.json"), read_config(folder / "run.yaml")
    return LocalModel(Job(plan, config, folder, folder / "run", device=device), rank_info)


def plain_loop(rank: LocalModel, batch: Batch) -> Callable[[], None]:
    """A minibatch of the plain model's training loop."""
    torch.manual_seed(0)
    model = load_config_model(rank.job.config, rank.job.directory).to(rank.device)
    optimizer = make_optimizer(rank.job.config.optimizer, dict(model.named_parameters()))

    def loop() -> None:
        rank.loss(model(*batch.inputs), batch.target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return loop


def engine_of(rank: LocalModel, transport: Transport) -> Engine:
    """That runs the rank's stage, and tells nobody."""
    (stage,) = rank.stages
    losses = LossSum(lambda tensor: None, rank.device)
    executor = Executor(
        stage_modules=stage.stage_modules,
        transport=transport,
        assignment=rank.job.plan.rank_assignment,
        loss=rank.loss,
        weights=Weights(stage.parameters),
        stepping=Stepping(
            {stage.stage: stage.make_stepping({}, lambda _: None)},
            rank.job.config,
            losses,
            losses.add_up,
        ),
        groups=StageGroups(None),
        on_loss=lambda minibatch, loss: None,
        rng=rank.rng,
    )
    return Engine({stage.stage: executor}, executor.transport)


class Bench:
    """One of the two processes."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.rank = rank_of(folder, RankInfo(number, 2, number, 2, "127.0.0.1", 0))
        self.batch = self.rank.examples.epoch(1).batch(0)
        self.still, self.transport = Still(), Transport(torch.device("cpu"), "gloo")
        self.plain = plain_loop(self.rank, self.batch)
        self._make_torch(folder)

    def _make_torch(self, folder: Path) -> None:
        config = self.rank.job.config
        model = load_config_model(config, self.rank.job.directory)
        policy = split_policy(folder / "plan/export-torch.json")
        pipe = pipeline(model, self.batch.inputs, split_policy=policy)
        self.stage = pipe.build_stage(self.number, torch.device("cpu"))
        self.torch_optimizer = make_optimizer(
            config.optimizer, dict(self.stage.submod.named_parameters())
        )

    def engine(self, name: ScheduleName, minibatches: int, microbatches: int, alone: bool) -> float:
        """Seconds of a whole run of our engine; its events are in `self.events`."""
        rank = self.rank
        spec = PipelineSpec(name, rank.job.plan.replicas, links(rank.interfaces), microbatches)
        actions = Schedule(spec, minibatches).actions(*rank.workers)
        engine = engine_of(rank, self.still if alone else self.transport)
        begin = time.perf_counter()
        engine.run(ActionStream(TrainingSegment(0, minibatches), actions), Same(self.batch))
        self.events = engine.times.events
        return time.perf_counter() - begin

    def alone(self) -> float:
        """Seconds of this stage's passes and update for a minibatch; there are no messages."""
        self.engine("weight-stashing", LONG, 1, alone=True)
        return sum(
            statistics.median(e.end - e.begin for e in self.events if e.action.kind is kind)
            for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)
        )

    def stashing(self) -> float:
        """Seconds per minibatch in the steady state: the mean."""
        self.engine("weight-stashing", LONG, 1, alone=False)
        ends = [e.end for e in self.events if e.action.kind is Kind.BACKWARD][FILLING:-FILLING]
        self.spans = [after - before for before, after in pairwise(ends)]
        return statistics.mean(self.spans)

    def stashing_median(self) -> float:
        """The same of the same run: the median, as of a stage alone."""
        return statistics.median(self.spans)

    def flush(self, microbatches: int) -> float:
        """Seconds per microbatch."""
        count = UPDATES * microbatches
        return self.engine("flush", count, microbatches, alone=False) / count

    def torch(self, microbatches: int) -> float:
        """Seconds per microbatch of Schedule1F1B and its optimizer's steps."""
        ours = Schedule1F1B(self.stage, microbatches, loss_fn=self.rank.loss)
        whole = torch.cat([self.batch.inputs[0]] * microbatches)
        target = torch.cat([self.batch.target] * microbatches)
        begin = time.perf_counter()
        for _ in range(UPDATES):
            if self.number == 0:
                ours.step(whole)
            else:
                ours.step(target=target)
            self.torch_optimizer.step()
            self.torch_optimizer.zero_grad()
        return (time.perf_counter() - begin) / (UPDATES * microbatches)

    def one_worker(self) -> float:
        """Seconds per minibatch of the plain model's training loop."""
        spans = []
        for _ in range(LONG // 2):
            begin = time.perf_counter()
            self.plain()
            spans.append(time.perf_counter() - begin)
        return statistics.median(spans)


def work(number: int, folder: str) -> None:
    """One process: all measurements in turns. The first writes them down."""
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=number, world_size=2)
    bench = Bench(number, Path(folder))
    turns: dict[str, Callable[[], float] | None] = {
        "alone 0": bench.alone if number == 0 else None,
        "alone 1": bench.alone if number == 1 else None,
        "one worker": bench.one_worker if number == 0 else None,
        "both": bench.alone,
        "stashing": bench.stashing,
        "period": bench.stashing_median,
    }
    for m in MICROBATCHES:
        turns[f"flush {m}"] = lambda m=m: bench.flush(m)  # type: ignore[misc]
        turns[f"torch {m}"] = lambda m=m: bench.torch(m)  # type: ignore[misc]
    rounds = []
    for round_ in range(ROUNDS + 1):
        found = {}
        for name, turn in turns.items():
            dist.barrier()
            seconds = turn() if turn is not None else 0.0
            both: list[Any] = [None, None]
            dist.all_gather_object(both, seconds)
            found[name] = max(both)
        if round_:  # the first is to warm up
            rounds.append(found)
    assert all(p.isfinite().all() for stage in bench.rank.stages for p in stage.parameters.values())
    if number == 0:
        (Path(folder) / "rounds.json").write_text(json.dumps(rounds))
    dist.destroy_process_group()


def show(name: str, rounds: pd.DataFrame) -> None:
    """The medians of the rounds' ratios, and within what range half of the rounds are; and the
    ratios of the shortest times, which others on the machine have slowed least.
    """
    median, found, least = rounds.median(), ratios(rounds), ratios(rounds.min().to_frame().T)
    print(f"{name}: one worker {median['one worker'] * 1e3:.1f} ms, stages alone", end=" ")
    print(*(f"{median[f'alone {stage}'] * 1e3:.1f} ms" for stage in (0, 1)), end="; ")
    print(f"pipeline {median['period'] * 1e3:.1f} ms per minibatch")
    for what, ratio in found.items():
        low, middle, high = ratio.quantile([0.25, 0.5, 0.75])
        best = f"shortest times {least[what].item():.3f}"
        print(f"  {what:32} {middle:.3f}   ({low:.3f} to {high:.3f})   {best}", flush=True)


def ratios(rounds: pd.DataFrame) -> pd.DataFrame:
    slower = rounds[["alone 0", "alone 1"]].max(axis=1)
    found = {
        "efficiency, other worker idle": slower / rounds["period"],
        "efficiency, both at work": rounds["both"] / rounds["period"],
        "two workers over one": rounds["one worker"] / rounds["period"],
    }
    for m in MICROBATCHES:
        found[f"stashing over torch, M = {m}"] = rounds[f"torch {m}"] / rounds["stashing"]
        found[f"flush over torch, M = {m}"] = rounds[f"torch {m}"] / rounds[f"flush {m}"]
    return pd.DataFrame(found)


if __name__ == "__main__":
    main()

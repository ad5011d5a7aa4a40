"""Does any order of lengths hang? `python scripts/bench/orders/random_lengths.py [ORDERS] [FIRST]`

Minibatches of eight lengths, each twice in an epoch, in a new random order in every epoch. Each
order is trained under every schedule with stages of 1, 1, of 2, 1 and of 1, 2, 1 workers: real
processes that exchange real messages, 25 orders in each launch, which has 100 seconds. Losses and
weights are those of the serial reference to 1e-12. A launch that hangs or differs ends the script
with an error. The runs print lines of their own; grep for `orders`.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[3] / "tests" / "support"))
sys.path.append(str(Path(__file__).parents[3] / "tests" / "runtime"))

import serial
import small_models
from plans import make_plan
from training import losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.graph.choices import SCHEDULES, ScheduleName
from pipedream.graph.plan import Plan
from pipedream.graph.run_config import DataFactory, Factory, OptimizerConfig, RunConfig
from pipedream.runtime.data.examples import Examples
from pipedream.runtime.run.job import Job
from pipedream.schedule.policy import policy
from pipedream.schedule.spec import PipelineSpec

LENGTHS, BATCH, MINIBATCHES, WIDTH = 8, 4, 16, 6
REPLICAS = ((1, 1), (2, 1), (1, 2, 1))
IN_A_LAUNCH, SECONDS = 25, 100.0
TOLERANCE = 1e-12


def sentences() -> list[tuple[Tensor, Tensor]]:
    """Four of each length, one length after the other, twice."""
    draw = torch.Generator().manual_seed(7)
    lengths = [1 + number // BATCH % LENGTHS for number in range(BATCH * MINIBATCHES)]
    pairs = (torch.randn(2, each, WIDTH, generator=draw, dtype=torch.float64) for each in lengths)
    return [(x, y) for x, y in pairs]


def minibatches(data_source: object, generator: torch.Generator) -> Iterator[int]:
    """The examples, with those of a minibatch together, in a random order of minibatches."""
    for number in torch.randperm(MINIBATCHES, generator=generator).tolist():
        yield from range(BATCH * number, BATCH * (number + 1))


def config(schedule: ScheduleName, replicas: tuple[int, ...], seed: int) -> RunConfig:
    least = policy(PipelineSpec(schedule, replicas, (), 1)).least_microbatches
    return RunConfig(
        format="pipedream-run/1",
        model=Factory(source="small_models:Skips"),
        data=DataFactory(source="random_lengths:sentences", varying=True),
        sampler=Factory(source="random_lengths:minibatches"),
        loss="mse_loss",
        optimizer=OptimizerConfig(args={"lr": 0.05, "momentum": 0.9}),
        batch_size=BATCH,
        microbatches=max(5, least),
        seed=seed,
        dtype="float64",
    )


def plan(stages: tuple[str, ...], replicas: tuple[int, ...]) -> Plan:
    """Stages made of the modules whose names are letters of these, such as a and bc."""
    captured = capture(small_models.Skips(), (torch.randn(BATCH, 3, WIDTH),))
    stage_of = {letter: stage for stage, letters in enumerate(stages) for letter in letters}
    pieces: list[list[str]] = [[] for _ in stages]
    for node in captured.graph.order:
        last = 0 if captured.graph.nodes[node].is_input else len(stages) - 1
        pieces[stage_of.get(captured.module_paths[node][:1], last)].append(node)
    return make_plan(captured.graph, pieces, replicas)


class Named(nn.Sequential):
    """Some layers of a model, under the names they have there."""

    def __init__(self, model: nn.Module, letters: str) -> None:
        super().__init__()
        for name in letters:
            self.add_module(name, getattr(model, name))


class Both(nn.Module):
    """The second and third layer of Skips, with the skip to the third."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.b, self.c = model.b, model.c

    def forward(self, first: Tensor) -> Tensor:
        return self.c(self.b(first) + first) * first


def reference(job: Job) -> serial.Serial:
    torch.manual_seed(job.config.seed)
    model = small_models.Skips().double()
    stages = [serial.Stage(Named(model, "a"), ("x",), ("first",))]
    if len(job.plan.replicas) == 2:
        stages += [serial.Stage(Both(model), ("first",), ("y",))]
    else:
        third = small_models.Tail(model.c)
        stages += [serial.Stage(Named(model, "b"), ("first",), ("second",))]
        stages += [serial.Stage(third, ("second", "first"), ("y",))]
    return serial.Serial(
        stages,
        lambda parameters: torch.optim.SGD(parameters, **job.config.optimizer.args),
        lambda values, target: nn.functional.mse_loss(values["y"], target),
        job.schedule,
        job.plan.replicas,
        job.config.microbatches,
    )


def check(job: Job) -> None:
    """Raises AssertionError unless the run computed what the serial reference does."""
    serially, expected = reference(job), []
    examples = Examples(job, torch.device("cpu"))
    examples.first()
    for number in range(1, job.epochs + 1):
        epoch = examples.epoch(number)
        batches = [epoch.batch(index) for index in range(MINIBATCHES)]
        assert {len(batch.inputs[0][0]) for batch in batches} == set(range(1, LENGTHS + 1))
        known = [serial.Minibatch({"x": batch.inputs[0]}, batch.target) for batch in batches]
        expected += serially.epoch(known)
    found = torch.tensor(losses(job), dtype=torch.float64)
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    for name, tensor in serially.weights.items():
        torch.testing.assert_close(weights(job)[name], tensor, rtol=TOLERANCE, atol=TOLERANCE)


def main() -> None:
    orders = int(sys.argv[1]) if sys.argv[1:] else 200
    first = int(sys.argv[2]) if sys.argv[2:] else 0
    plans = [plan(("a", "bc") if len(r) == 2 else ("a", "b", "c"), r) for r in REPLICAS]
    slowest, begin, launches = 0.0, time.monotonic(), -(-orders // IN_A_LAUNCH)
    for seed in range(first, first + launches):
        for planned, schedule in itertools.product(plans, SCHEDULES):
            slowest = max(slowest, seconds(planned, schedule, seed))
        done, took = (seed - first + 1) * IN_A_LAUNCH, time.monotonic() - begin
        runs = len(plans) * len(SCHEDULES)
        print(
            f"{done} orders in each of {runs} pipelines are equal to the serial reference, after"
            f" {took:.0f} s; the slowest launch took {slowest:.1f} s",
            flush=True,
        )


def seconds(planned: Plan, schedule: ScheduleName, seed: int) -> float:
    """Trains and checks 25 orders; how long the launch took."""
    asked = config(schedule, planned.replicas, seed)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(planned, asked, Path(__file__).parent, Path(folder), schedule=schedule)
        job = replace(job, epochs=IN_A_LAUNCH, keep=1)
        begin = time.monotonic()
        run_jobs([job], SECONDS)
        took = time.monotonic() - begin
        check(job)
    return took


if __name__ == "__main__":
    main()

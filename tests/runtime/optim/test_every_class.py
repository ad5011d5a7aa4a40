"""Every class of torch.optim and torch.optim.lr_scheduler, as this torch has them: it trains a
pipeline as it trains the plain model, and goes on from a checkpoint, or is refused for a reason.

A class that a later torch brings is found here: an optimizer is tried with a learning rate alone, a
scheduler has to be written down below.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from training import chain_config, losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import GroupConfig, OptimizerConfig, RunConfig, SchedulerConfig
from pipedream.runtime.checkpoint import files as checkpoint
from pipedream.runtime.checkpoint.files import copied
from pipedream.runtime.data.reader import Epoch
from pipedream.runtime.optim.optimizers import make_optimizer, restore_state, state_tensors
from pipedream.runtime.optim.rates import LearningRate, LossSum, make_scheduler
from pipedream.runtime.optim.stepping import StageStepping, Stepping
from pipedream.runtime.run.job import Job
from pipedream.runtime.run.training_segment import Position
from tests.runtime.engine.test_semantics import SUPPORT, plan_for

REFUSED = {
    "LBFGS": "asks for the loss several times in a step",
    "SparseAdam": "takes sparse gradients only",
    "Optimizer": "has no such class",
    "LRScheduler": "has no such class",
    "_LRScheduler": "has no such class",
}

ARGS: dict[str, dict[str, Any]] = {
    "LambdaLR": {"lr_lambda": "small_models:rising"},
    "MultiplicativeLR": {"lr_lambda": "small_models:falling"},
    "StepLR": {"step_size": 3},
    "MultiStepLR": {"milestones": [2, 5]},
    "ConstantLR": {"total_iters": 3},
    "LinearLR": {"total_iters": 4},
    "ExponentialLR": {"gamma": 0.9},
    "SequentialLR": {
        "schedulers": [
            {"name": "LinearLR", "args": {"total_iters": 3}},
            {"name": "LambdaLR", "args": {"lr_lambda": "small_models:falling"}},
        ],
        "milestones": [3],
    },
    "CosineAnnealingLR": {"T_max": 8},
    "ChainedScheduler": {
        "schedulers": [
            {"name": "ConstantLR", "args": {"total_iters": 3}},
            {"name": "ExponentialLR", "args": {"gamma": 0.8}},
        ]
    },
    "ReduceLROnPlateau": {"patience": 0, "threshold": 0.5, "factor": 0.5},
    "CyclicLR": {
        "base_lr": 0.01,
        "max_lr": 0.05,
        "step_size_up": 3,
        "scale_fn": "small_models:falling",
        "cycle_momentum": False,
    },
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "OneCycleLR": {"max_lr": 0.05, "total_steps": 20, "cycle_momentum": False},
    "PolynomialLR": {"total_iters": 6},
}
"""Of the schedulers, as in a run config."""


def classes(module: Any, base: type) -> list[str]:
    found = vars(module).items()
    return [name for name, each in found if isinstance(each, type) and issubclass(each, base)]


OPTIMIZERS = [name for name in classes(torch.optim, Optimizer) if name not in REFUSED]
SCHEDULERS = [name for name in classes(lr_scheduler, LRScheduler) if name not in REFUSED]
EPOCHS, ROUND = 2, 4
BIASES = GroupConfig(match=("*.bias",), args={"lr": 0.05})


def scheduler_config(name: str) -> SchedulerConfig:
    every = "epoch" if name == "ReduceLROnPlateau" else "update"
    return SchedulerConfig(name=name, args=ARGS[name], every=every)


def optimizer_config(name: str) -> OptimizerConfig:
    """Biases learn faster; those of Muon, which knows matrices alone, with another optimizer."""
    groups = BIASES.model_copy(update={"name": "AdamW"}) if name == "Muon" else BIASES
    return OptimizerConfig(name=name, args={"lr": 0.02}, groups=(groups,))


def resolved(args: dict[str, Any]) -> dict[str, Any]:
    """As one writes them in Python, but for schedulers inside."""
    return {
        name: getattr(small_models, value.partition(":")[2])
        if isinstance(value, str) and ":" in value
        else value
        for name, value in args.items()
    }


def plain_scheduler(name: str, args: dict[str, Any], optimizer: Optimizer) -> Any:
    args = resolved(args)
    if "schedulers" in args:
        parts = [plain_scheduler(p["name"], p["args"], optimizer) for p in args["schedulers"]]
        args["schedulers"] = parts
    if name == "ChainedScheduler":
        return lr_scheduler.ChainedScheduler(**args)
    return getattr(lr_scheduler, name)(optimizer, **args)


def plain_optimizers(name: str, model: nn.Module) -> list[Optimizer]:
    biases = [p for n, p in model.named_parameters() if n.endswith(".bias")]
    others = [p for n, p in model.named_parameters() if not n.endswith(".bias")]
    kind = getattr(torch.optim, name)
    if name == "Muon":
        return [torch.optim.AdamW(biases, lr=0.05), kind(others, lr=0.02)]
    return [kind([{"params": biases, "lr": 0.05}, {"params": others}], lr=0.02)]


def plain_loop(config: RunConfig) -> tuple[list[float], nn.Module]:
    """The losses of every minibatch, and the model at the end."""
    torch.manual_seed(config.seed)
    model = small_models.Chain().double()
    optimizers = plain_optimizers(config.optimizer.name, model)
    given = config.scheduler
    assert given is not None
    schedulers = [plain_scheduler(given.name, given.args, each) for each in optimizers]
    found: list[float] = []
    for batches in epochs(config):
        for begin in range(0, len(batches), ROUND):
            part = [F.mse_loss(model(x), y) for x, y in batches[begin : begin + ROUND]]
            found += [loss.item() for loss in part]
            torch.stack(part).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for scheduler in schedulers if given.every == "update" else ():
                scheduler.step()
        for scheduler in schedulers if given.every == "epoch" else ():
            scheduler.step(sum(found[-len(batches) :]) / len(batches))
    return found, model


def epochs(config: RunConfig) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    data, _ = small_models.regression()
    for number in range(1, EPOCHS + 1):
        epoch = Epoch(data, config, number, torch.device("cpu"))
        batches = [epoch.batch(index) for index in range(len(epoch))]
        yield [(batch.inputs[0], batch.target) for batch in batches]


def config_for(optimizer: str, scheduler: str) -> RunConfig:
    changes = {"dtype": "float64", "microbatches": ROUND, "scheduler": scheduler_config(scheduler)}
    return chain_config(optimizer_config(optimizer)).model_copy(update=changes)


COUNT = max(len(OPTIMIZERS), len(SCHEDULERS))
PAIRS = list(islice(zip(cycle(OPTIMIZERS), cycle(SCHEDULERS), strict=False), COUNT))
"""In which all of them are."""


class Part:
    """A stage as far as learning goes: the parameters whose names begin with its letters."""

    def __init__(self, letters: str, model: nn.Module, config: RunConfig) -> None:
        whole = dict(model.named_parameters())
        self.parameters = {n: nn.Parameter(p.clone()) for n, p in whole.items() if n[0] in letters}
        self.optimizer = make_optimizer(config.optimizer, self.parameters, whole)
        rate = LearningRate(config.scheduler, self.optimizer, SUPPORT)
        steps = StageStepping(self.optimizer, self.parameters, config, rate, self.parameters)
        losses = LossSum(lambda tensor: None, torch.device("cpu"))
        self.stepping = Stepping({0: steps}, config, losses, losses.add_up)

    def step(self) -> None:
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        self.stepping.stages[0].step(gradients, norm=None, updates=1)


def train_parts(parts: Sequence[Part], batches: Sequence[Any], ends: bool) -> list[float]:
    """The losses; `ends`: the epoch ends with these batches."""
    found = []
    model = small_models.Chain().double()
    known = {name: p for part in parts for name, p in part.parameters.items()}
    for begin in range(0, len(batches), ROUND):
        round_of = batches[begin : begin + ROUND]
        each = [F.mse_loss(functional_call(model, known, (x,)), y) for x, y in round_of]
        found += [loss.item() for loss in each]
        torch.stack(each).mean().backward()
        for part in parts:
            for loss in each:
                part.stepping.note(loss.detach())
            part.step()
    for part in parts:
        part.stepping.end_segment()
        if ends:
            part.stepping.end_epoch(2 * len(batches))
    return found


def saved(parts: Sequence[Part], folder: Path) -> Path:
    for stage, part in enumerate(parts):
        tensors = state_tensors(part.optimizer, part.parameters)
        state = [copied(part.parameters), copied(tensors)]
        checkpoint.write_stage(folder, Position(1, 8), stage, len(parts), *state)
    return checkpoint.publish(folder, Position(1, 8), len(parts), parts[0].stepping.state())


def loaded(part: Part, path: Path) -> Part:
    checkpoint.load_model(path, part.parameters)
    known = checkpoint.load_optimizer(path, part.parameters)
    restore_state(part.optimizer, part.parameters, known)
    part.stepping.restore(checkpoint.progress_of(path, checkpoint.read_state(path)))
    return part


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(("optimizer", "scheduler"), PAIRS)
def test_stages_learn_what_the_plain_model_does_and_others_go_on(
    optimizer: str, scheduler: str, tmp_path: Path
) -> None:
    """Saved inside the second epoch, and gone on from by stages that are cut elsewhere; the biases
    are in a group of their own.
    """
    config = config_for(optimizer, scheduler)
    expected, model = plain_loop(config)
    torch.manual_seed(config.seed)
    start = small_models.Chain().double()
    parts = [Part(letters, start, config) for letters in ("a", "bc")]
    first, second = epochs(config)
    found = train_parts(parts, first[:8], False) + train_parts(parts, first[8:], True)
    found += train_parts(parts, second[:8], False)
    path = saved(parts, tmp_path)
    with torch.no_grad():
        parts = [loaded(Part(letters, start, config), path) for letters in ("ab", "c")]
    found += train_parts(parts, second[8:], True)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)
    wanted = model.state_dict()
    for part in parts:
        for name, tensor in part.parameters.items():
            torch.testing.assert_close(tensor.data, wanted[name], rtol=1e-12, atol=1e-12)


RUNS = [
    ("Muon", "LambdaLR"),
    ("ASGD", "ChainedScheduler"),
    ("Adafactor", "CyclicLR"),
]


@pytest.mark.thorough
@pytest.mark.slow
def test_runs_are_those_of_the_plain_model_and_go_on(tmp_path: Path) -> None:
    """In real processes: inside the second epoch each goes on, bit for bit as if never stopped."""
    captured = capture(small_models.Chain(), (torch.randn(4, 6),))
    plan = plan_for(captured, ("a", "bc"), (1, 1))
    jobs, parts = {}, {}
    for pair in RUNS:
        run, config = tmp_path / "-".join(pair), config_for(*pair)
        jobs[pair] = Job(plan, config, SUPPORT, run, schedule="flush", epochs=EPOCHS, save_every=8)
    run_jobs(list(jobs.values()))
    for pair, job in jobs.items():
        parts[pair] = replace(job, run=job.run / "again", resume=True)
        shutil.copytree(job.checkpoints, parts[pair].checkpoints, symlinks=True)
        shutil.copy(job.run / "metrics.jsonl", parts[pair].run)
        shutil.rmtree(parts[pair].checkpoints / "epoch-0002")
    run_jobs(list(parts.values()))
    for pair, job in jobs.items():
        assert losses(parts[pair]) == losses(job), pair
        expected, model = plain_loop(job.config)
        assert losses(job) == pytest.approx(expected, rel=1e-12, abs=1e-12), pair
        for name, tensor in model.state_dict().items():
            assert torch.equal(weights(parts[pair])[name], weights(job)[name]), (pair, name)
            torch.testing.assert_close(
                weights(job)[name], tensor, rtol=1e-12, atol=1e-12, msg=f"{pair} {name}"
            )


@pytest.mark.parametrize("name", [n for n in classes(torch.optim, Optimizer) if n in REFUSED])
def test_an_optimizer_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UserError, match=f"{REFUSED[name]}.*: write|; write"):
        make_optimizer(OptimizerConfig(name=name), {"w": nn.Parameter(torch.zeros(2, 2))})


@pytest.mark.parametrize("name", [n for n in classes(lr_scheduler, LRScheduler) if n in REFUSED])
def test_a_scheduler_is_refused_with_the_reason(name: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1)
    with pytest.raises(UserError, match=f"{REFUSED[name]}; write"):
        make_scheduler(SchedulerConfig(name=name), optimizer, SUPPORT)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_moves_each_group_and_does_it_again(name: str) -> None:
    """As it moves torch's own groups, the momentum, too; this stage has no member of the first."""
    given = scheduler_config(name)
    if "cycle_momentum" in given.args:
        given = given.model_copy(update={"args": given.args | {"cycle_momentum": True}})
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 2))
    plain = torch.optim.SGD([{"params": [one], "lr": 0.05}, {"params": [other]}], 0.02, 0.9)
    expected = plain_scheduler(name, given.args, plain)
    config = OptimizerConfig(args={"lr": 0.02, "momentum": 0.9}, groups=(BIASES,))

    def begun() -> tuple[LearningRate, Optimizer]:
        optimizer = make_optimizer(config, {"a.weight": other}, ["a.bias", "a.weight"])
        return LearningRate(given, optimizer, SUPPORT), optimizer

    rate, optimizer = begun()
    plain.step()
    optimizer.step()
    seen = [shown(plain)]
    for metric in (3.0, 2.0, 1.9, float("nan"), 0.4, 0.3):
        if rate.metric is None:
            expected.step()
            rate.advance("update")
        else:
            expected.step(metric)
            rate.see(metric)
        seen.append(shown(plain))
        assert shown(optimizer) == seen[-1]
    assert len(set(seen)) > 1, "nothing moves"
    again, optimizer = begun()
    again.restore(rate.advances, rate.metrics)
    assert shown(optimizer) == seen[-1]
    assert (again.advances, again.metrics) == (rate.advances, rate.metrics)


def shown(optimizer: Optimizer) -> tuple[tuple[float, float], ...]:
    return tuple((group["lr"], group["momentum"]) for group in optimizer.param_groups)

"""Schedulers that look at a metric, and those that call a function of the user's."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from torch import nn
from torch.nn import functional as F
from training import chain_config, losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import DataFactory, OptimizerConfig, SchedulerConfig
from pipedream.runtime.data.reader import Epoch
from pipedream.runtime.optim.rates import make_scheduler
from pipedream.runtime.run.job import Job
from tests.runtime.engine.test_semantics import SUPPORT, plan_for

PLATEAU = {"patience": 0, "threshold": 0.3, "factor": 0.25}
"""An epoch that has not taken a third off is one too many."""
EPOCHS, ROUND = 4, 4


def job_for(metric: str, run: Path, **changes: Any) -> Job:
    """Two replicas of the last stage: neither knows all losses, and rank 0 none."""
    scheduler = SchedulerConfig(name="ReduceLROnPlateau", args=PLATEAU, metric=metric)  # type: ignore[arg-type]
    config = chain_config(OptimizerConfig(name="SGD", args={"lr": 0.5, "momentum": 0.9}))
    config = config.model_copy(
        update={
            "dtype": "float64",
            "microbatches": ROUND,
            "scheduler": scheduler,
            "data": DataFactory(source="small_models:classes", args={"examples": 84}),
            "loss": "cross_entropy",
            "evaluate_every": 1 if metric == "held_out_loss" else None,
        }
    )
    plan = plan_for(capture(small_models.Chain(), (torch.randn(4, 6),)), ("ab", "c"), (1, 2))
    return Job(plan, config, SUPPORT, run, epochs=EPOCHS, **changes)


def plain_loop(job: Job) -> tuple[list[float], nn.Module, set[float]]:
    """The losses, the model at the end, and the learning rates there have been."""
    config = job.config
    torch.manual_seed(config.seed)
    model = small_models.Chain().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **PLATEAU)  # type: ignore[arg-type]
    train, held_out = small_models.classes(84)
    found, rates = [], set()
    for number in range(1, EPOCHS + 1):
        epoch = Epoch(train, config, number, torch.device("cpu"))
        batches = [epoch.batch(index) for index in range(len(epoch))]
        for begin in range(0, len(batches), ROUND):
            part = batches[begin : begin + ROUND]
            each = [F.cross_entropy(model(batch.inputs[0]), batch.target) for batch in part]
            found += [loss.item() for loss in each]
            torch.stack(each).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        x, y = held_out.tensors
        with torch.no_grad():
            tried = F.cross_entropy(model(x.double()), y).item()
        mean = sum(found[-len(batches) :]) / len(batches)
        scheduler.step(mean if config.evaluate_every is None else tried)
        rates.add(optimizer.param_groups[0]["lr"])
    return found, model, rates


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("metric", ["loss", "held_out_loss"])
def test_a_plateau_is_seen_by_all_ranks_as_by_the_plain_loop(metric: str, tmp_path: Path) -> None:
    job = job_for(metric, tmp_path, schedule="flush")
    run_jobs([job])
    expected, model, rates = plain_loop(job)
    assert len(rates) > 1, "it is never reduced"
    assert losses(job) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights(job)[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("metric", ["loss", "held_out_loss"])
def test_a_run_that_goes_on_has_seen_what_one_saw_that_was_never_stopped(
    metric: str, tmp_path: Path
) -> None:
    """Inside an epoch, of whose losses some are behind it; and at the end of one, before its
    held-out data are tried.
    """
    whole = job_for(metric, tmp_path / "whole", save_every=4)
    run_jobs([whole])
    names = sorted(path.name for path in whole.checkpoints.glob("epoch-*"))
    goes_on = []
    for last in ("epoch-0002-000008", "epoch-0003"):
        part = replace(whole, run=tmp_path / last, resume=True)
        shutil.copytree(whole.run, part.run, symlinks=True)
        for name in names[names.index(last) + 1 :]:
            shutil.rmtree(part.checkpoints / name)
        goes_on.append(part)
    run_jobs(goes_on)
    for part in goes_on:
        assert part.saved == whole.saved
        assert losses(part) == losses(whole)
        for name, tensor in weights(whole).items():
            assert torch.equal(weights(part)[name], tensor), name
        assert states(part) == states(whole)


def states(job: Job) -> str:
    return (job.checkpoints / "latest/state.json").read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "StepLR", "metric": "loss"}, "StepLR uses no metric: remove `metric`"),
        (
            {"name": "ReduceLROnPlateau", "every": "update"},
            "metric, which is not available per update: remove `every`$",
        ),
        ({"name": "ReduceLROnPlateau", "args": {"mode": "least"}}, "mode least is unknown"),
        ({"name": "LambdaLR", "args": {"lr_lambda": "lambda n: 1 / n"}}, "write package.module:"),
        ({"name": "LambdaLR", "args": {"lr_lambda": "small_models:up"}}, "has no 'up'"),
        (
            {"name": "LambdaLR", "args": {"lr_lambda": "small_models:wordy"}},
            "LambdaLR: lr_lambda small_models:wordy gives a str for 0, not a number",
        ),
        (
            {"name": "LambdaLR", "args": {"lr_lambda": ["small_models:rising"] * 2}},
            "Expected 1 lr_lambdas, but got 2",
        ),
        (
            {
                "name": "ChainedScheduler",
                "args": {"schedulers": [{"name": "ExponentialLR", "every": "update"}]},
            },
            "ChainedScheduler: schedulers: all step as it does: remove `every` from them",
        ),
    ],
)
def test_a_scheduler_that_does_not_go_is_told(given: dict[str, Any], message: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1)
    config = SchedulerConfig.model_validate(given)
    with pytest.raises(UserError, match=message):
        make_scheduler(config, optimizer, SUPPORT)


@pytest.mark.parametrize("every", [None, 1])
def test_a_metric_of_held_out_data_needs_them(every: int | None, tmp_path: Path) -> None:
    job = job_for("held_out_loss", tmp_path)
    job = replace(job, config=job.config.model_copy(update={"evaluate_every": every}))
    if every:
        job.check_scheduler()
        job = replace(job, evaluate=False)
    with pytest.raises(UserError, match=r"metric: held_out_loss .* write evaluate_every: 1"):
        job.check_scheduler()

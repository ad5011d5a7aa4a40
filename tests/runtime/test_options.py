"""What people train with, each against a plain loop in one process that knows no pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from torch import nn
from torch.nn import functional as F
from training import losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.graph.choices import ScheduleName
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import DataFactory, OptimizerConfig, RunConfig, SchedulerConfig
from pipedream.runtime.data.reader import Epoch
from pipedream.runtime.optim.rates import make_scheduler
from pipedream.runtime.run.job import Job
from tests.runtime.engine.test_semantics import (
    CLASSES,
    SGD,
    SUPPORT,
    assert_equals_serial,
    chain_stages,
    config_for,
    plan_for,
)

ADAM = OptimizerConfig(name="AdamW", args={"lr": 0.02})
PARTS = ("a", "b", "c")


def job_for(
    folder: Path,
    replicas: tuple[int, ...],
    schedule: ScheduleName = "flush",
    model: str = "Chain",
    dtype: str = "float64",
    **changes: Any,
) -> Job:
    parts = ("abc",) if len(replicas) == 1 else ("a", "bc") if len(replicas) == 2 else PARTS
    captured = capture(getattr(small_models, model)(), (torch.randn(4, 6),))
    config = config_for(model, dtype, ADAM).model_copy(update=changes)
    run = folder / "-".join(map(str, replicas))
    return Job(
        plan_for(captured, parts, replicas), config, SUPPORT, run, schedule=schedule, epochs=2
    )


Step = Callable[[nn.Module, torch.optim.Optimizer, Callable[[], float]], None]


def rounds(config: RunConfig) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The minibatches of every update, epoch by epoch."""
    data, _ = getattr(small_models, config.data.source.partition(":")[2])(**config.data.args)
    for number in (1, 2):
        epoch = Epoch(data, config, number, torch.device("cpu"))
        batches = [epoch.batch(index) for index in range(len(epoch))]
        for begin in range(0, len(batches), config.microbatches):
            part = batches[begin : begin + config.microbatches]
            yield [(batch.inputs[0], batch.target) for batch in part]


def plain_model(config: RunConfig) -> nn.Module:
    torch.manual_seed(config.seed)
    name = config.model.source.partition(":")[2]
    return getattr(small_models, name)().to(getattr(torch, config.dtype)).train()  # type: ignore[no-any-return]


def take_mean(model: nn.Module, count: int) -> None:
    """Of gradients that were added up: in bfloat16 a mean of the losses would round otherwise."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= count


def assert_same(job: Job, expected: list[float], model: nn.Module, tolerance: float) -> None:
    assert losses(job) == pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights(job)[name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(2, 1), (1, 3, 2)], ids=str)
def test_the_norm_of_the_whole_model_is_clipped_and_the_rate_goes_by_updates(
    replicas: tuple[int, ...], tmp_path: Path
) -> None:
    """As torch.nn.utils.clip_grad_norm_ over all parameters of the plain model."""
    scheduler = SchedulerConfig(name="OneCycleLR", args={"max_lr": 0.1, "total_steps": 8})
    job = job_for(
        tmp_path,
        replicas,
        clip_norm=0.05,
        scheduler=scheduler.model_copy(update={"every": "update"}),
    )
    run_jobs([job])
    model = plain_model(job.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, **scheduler.args)
    expected, norms = [], []
    for part in rounds(job.config):
        found = [F.mse_loss(model(x), target) for x, target in part]
        expected += [loss.item() for loss in found]
        torch.stack(found).mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
    assert max(norms) > 0.05, "nothing is clipped"
    # torch adds 1e-6 to the norm, a sum of stages' squares rounds otherwise
    assert_same(job, expected, model, 1e-12)


WARM_UP = {"name": "LinearLR", "args": {"start_factor": 0.1, "total_iters": 3}}
THEN_DECAY = {"name": "ExponentialLR", "args": {"gamma": 0.8}}
ONE_AFTER_ANOTHER = {"schedulers": [WARM_UP, THEN_DECAY], "milestones": [3]}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    "scheduler",
    [
        SchedulerConfig.model_validate(THEN_DECAY),
        SchedulerConfig(name="SequentialLR", args=ONE_AFTER_ANOTHER, every="update"),
    ],
    ids=lambda scheduler: scheduler.name,
)
def test_a_run_that_goes_on_has_the_learning_rate_of_one_that_was_never_stopped(
    scheduler: SchedulerConfig, tmp_path: Path
) -> None:
    whole = job_for(tmp_path / "whole", (2, 1), "weight-stashing", scheduler=scheduler)
    begun = job_for(tmp_path / "begun", (2, 1), "weight-stashing", scheduler=scheduler)
    run_jobs([whole, replace(begun, epochs=1), replace(begun, resume=True)])
    assert losses(begun) == losses(whole)
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(begun)[name], tensor), name


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1), (1, 3, 2)], ids=str)
def test_several_minibatches_make_an_update_without_a_flush(
    replicas: tuple[int, ...], serial: Any, tmp_path: Path
) -> None:
    job = job_for(tmp_path, replicas, "weight-stashing", accumulate=3, optimizer=SGD)
    run_jobs([job])
    parts = ("a", "bc") if len(replicas) == 2 else PARTS
    assert_equals_serial(job, serial, chain_stages, parts)


@pytest.mark.slow
def test_a_stage_by_itself_is_clipped_by_its_own_norm(tmp_path: Path) -> None:
    """On one worker weight stashing is the plain loop."""
    job = job_for(tmp_path, (1,), "weight-stashing", clip_norm=0.05)
    run_jobs([job])
    model = plain_model(job.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    expected = []
    for part in rounds(job.config):
        for x, target in part:
            loss = F.mse_loss(model(x), target)
            expected.append(loss.item())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(job, expected, model, 1e-12)


@pytest.mark.slow
def test_bfloat16_crosses_the_stages_as_the_plain_model_computes_it(tmp_path: Path) -> None:
    job = job_for(tmp_path, (1, 2, 1), dtype="float32", autocast="bfloat16")
    run_jobs([job])
    model = plain_model(job.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    expected = []
    for part in rounds(job.config):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = [F.mse_loss(model(x), target) for x, target in part]
        expected += [loss.item() for loss in found]
        for loss in found:
            loss.backward()
        take_mean(model, len(found))
        optimizer.step()
        optimizer.zero_grad()
    assert_same(job, expected, model, 1e-5)


@pytest.mark.slow
def test_float16_finds_its_scale_as_torch_does(tmp_path: Path) -> None:
    """The first updates overflow and are left out by all stages, until the scale has come down."""
    job = job_for(tmp_path, (2, 1), dtype="float32", autocast="float16", model="Steep")
    run_jobs([job])
    model = plain_model(job.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=65_536.0)
    expected, scales = [], []
    for part in rounds(job.config):
        with torch.autocast("cpu", dtype=torch.float16):
            found = [F.mse_loss(model(x), target) for x, target in part]
        expected += [loss.item() for loss in found]
        for loss in found:
            scaler.scale(loss).backward()
        take_mean(model, len(found))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    assert scales[0] < 65_536, "nothing overflows"
    assert scales[-1] == scales[-2], "everything overflows"
    assert_same(job, expected, model, 1e-5)


@pytest.mark.slow
def test_an_update_with_a_gradient_that_is_no_number_is_left_out_by_all(tmp_path: Path) -> None:
    changes = {"nan": "skip", "data": DataFactory(source="small_models:one_bad_example")}
    job = job_for(tmp_path, (2, 1), **changes)
    run_jobs([job])
    model = plain_model(job.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    expected, skipped = [], 0
    for part in rounds(job.config):
        found = [F.mse_loss(model(x), target) for x, target in part]
        expected += [loss.item() for loss in found]
        whole = torch.stack(found).mean()
        if whole.isfinite():
            whole.backward()
            optimizer.step()
        else:
            skipped += 1
        optimizer.zero_grad()
    assert skipped == 2
    summary = json.loads((job.run / "summary.json").read_text())
    assert [rank["updates_left_out"] for rank in summary["ranks"]] == [2, 2, 2]
    assert_same(job, expected, model, 1e-12)


@pytest.mark.slow
def test_a_gradient_that_is_a_view_of_what_was_received_is_not_written_over(
    tmp_path: Path,
) -> None:
    """The memory of received gradients once went round while the token's gradient lay in it."""
    job = job_for(tmp_path, (1, 1), model="Token", microbatches=16)
    run_jobs([job])
    model = plain_model(job.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    expected = []
    for part in rounds(job.config):
        found = [F.mse_loss(model(x), target) for x, target in part]
        expected += [loss.item() for loss in found]
        torch.stack(found).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(job, expected, model, 1e-12)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_compiled_stage_learns_the_same(tmp_path: Path) -> None:
    noisy = {"model": "Noisy", "dtype": "float32", "data": CLASSES, "loss": "cross_entropy"}
    plain = job_for(tmp_path / "plain", (1, 1), "weight-stashing", **noisy)
    compiled = job_for(
        tmp_path / "compiled", (1, 1), "weight-stashing", **noisy, compile="aot_eager"
    )
    run_jobs([plain, compiled])
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(compiled)[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("Nothing", {}, "has no such class; write CosineAnnealingLR"),
        ("StepLR", {"steps": 3}, "StepLR {'steps': 3}: "),
        ("ChainedScheduler", {"schedulers": ["StepLR"]}, "a list, each with its name and args"),
        ("SequentialLR", {"schedulers": [{"name": "Nothing"}]}, "'Nothing': torch.optim"),
    ],
)
def test_a_wrong_scheduler_is_named(name: str, args: dict[str, Any], message: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1)
    with pytest.raises(UserError, match=message):
        make_scheduler(SchedulerConfig(name=name, args=args), optimizer, SUPPORT)

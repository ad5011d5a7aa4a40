"""Runs in which replicas divide the updates learn what runs do in which each makes all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import small_models
import torch
from job_cases import ordered
from schedules import policy
from sharded_runs import Case, captured
from sharded_runs import job_of as sharded_job
from training import losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.graph.run_config import AsynchronousConfig, GroupConfig, OptimizerConfig
from pipedream.runtime.run.job import Job
from tests.runtime.engine.test_semantics import (
    EPOCHS,
    SGD,
    SUPPORT,
    assert_equals_serial,
    chain_stages,
    config_for,
    plan_for,
)

ADAM = OptimizerConfig(name="AdamW", args={"lr": 0.02, "weight_decay": 0.1})
GROUPS = OptimizerConfig(
    name="Adam",
    args={"lr": 0.02, "weight_decay": 0.1},
    groups=(GroupConfig(match=("*.bias",), name="SGD", args={"lr": 0.1, "momentum": 0.9}),),
)


def job_of(
    folder: Path,
    replicas: Sequence[int] = (2, 1),
    schedule: str = "flush",
    optimizer: OptimizerConfig = ADAM,
    model: str = "Chain",
    dtype: str = "float64",
    **changes: object,
) -> Job:
    """A run with the updates divided; in 15 minibatches of 4 examples and one of 3 an epoch."""
    parts = {1: ("abc",), 2: ("a", "bc"), 3: ("a", "b", "c")}[len(replicas)]
    known = capture(getattr(small_models, model)(), (torch.randn(4, 6),))
    config = config_for(model, dtype, optimizer)
    least = policy(schedule, replicas).least_microbatches  # type: ignore[arg-type]
    changes = {"zero": True, "microbatches": max(least, 5)} | changes
    return Job(
        plan_for(known, parts, replicas),
        config.model_copy(update=changes),
        SUPPORT,
        folder,
        schedule=schedule,  # type: ignore[arg-type]
        epochs=EPOCHS,
    )


def divided(job: Job) -> Job:
    return replace(job, config=job.config.model_copy(update={"zero": True}))


def whole(job: Job) -> Job:
    """The same without."""
    config = job.config.model_copy(update={"zero": False})
    return replace(job, config=config, run=job.run.with_name(f"{job.run.name} whole"))


def assert_alike(job: Job, other: Job, digits: float = 1e-12) -> None:
    assert losses(job) == pytest.approx(losses(other), rel=digits, abs=digits)
    expected = weights(other)
    found = weights(job)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=digits, atol=digits, msg=name)


CASES = [
    *(("flush", counts, ADAM) for counts in ((2, 1), (1, 3), (2, 3, 1))),
    ("2bw", (3, 1), SGD),
    ("weight-stashing", (2, 1), SGD),
    ("weight-stashing", (4, 3, 1), ADAM),
    ("gpipe", (3, 2), ADAM),
    ("vertical-sync", (2, 2), SGD),
]


@pytest.mark.slow
def test_losses_and_weights_are_those_of_the_serial_reference(
    serial: ModuleType, tmp_path: Path
) -> None:
    """Parts of 12 and of 2 and 3 elements for two and three replicas, of 9 and 2 or none for four;
    epochs end with a smaller minibatch, in a round with fewer.
    """
    jobs = [
        job_of(tmp_path / f"{schedule} {counts}", counts, schedule, optimizer)
        for schedule, counts, optimizer in CASES
    ]
    run_jobs(jobs)
    for job in jobs:
        parts = ("a", "bc") if len(job.plan.replicas) == 2 else ("a", "b", "c")
        assert_equals_serial(job, serial, chain_stages, parts)


@pytest.mark.slow
def test_clipped_in_groups_frozen_and_late(tmp_path: Path) -> None:
    """What depends on more than one part of a parameter, or on which parameters there are."""
    late = AsynchronousConfig(rate_correction=20, nesterov=0.9)
    jobs = [
        job_of(tmp_path / "clipped", (2, 1), clip_norm=0.05),
        job_of(tmp_path / "by stage", (3, 1), "weight-stashing", SGD, clip_norm=0.05),
        job_of(tmp_path / "groups", (2, 3), optimizer=GROUPS),
        job_of(tmp_path / "frozen", (2, 1), model="FrozenFirst"),
        job_of(tmp_path / "aside", (3,), model="Aside"),
        job_of(tmp_path / "tied", (2, 1, 2), model="Tied", clip_norm=0.05),
        job_of(tmp_path / "late", (2, 1), "weight-stashing", ADAM, asynchronous=late),
        job_of(tmp_path / "skip", (2, 2), nan="skip", loss_scale=8.0, model="Normed"),
    ]
    run_jobs([each for job in jobs for each in (job, whole(job))])
    for job in jobs:
        assert_alike(job, whole(job))


@pytest.mark.slow
def test_single_nodes_run_again_or_activations_move_to_the_host(
    serial: ModuleType, tmp_path: Path
) -> None:
    jobs = []
    for name, schedule, counts in (
        ("again", "flush", (2, 3)),
        ("moved", "weight-stashing", (2, 1)),
    ):
        job = job_of(tmp_path / name, counts, schedule, SGD)
        moved = name == "moved"
        stages = [
            stage.model_copy(
                update={"zero": True, "offload": moved, "recompute": not moved and stage.nodes[::2]}
            )
            for stage in job.plan.stages
        ]
        config = job.config.model_copy(update={"zero": None})
        plan = job.plan.model_copy(update={"stages": tuple(stages)})
        jobs.append(replace(job, plan=plan, config=config))
    run_jobs(jobs)
    for job in jobs:
        assert all(
            job.divides_updates(each.stage) == (each.replicas > 1) for each in job.plan.stages
        )
        assert all(stage.by_autograd for stage in job.plan.stages)
        assert_equals_serial(job, serial, chain_stages, ("a", "bc"))


@pytest.mark.thorough
@pytest.mark.slow
def test_types_and_orders(tmp_path: Path) -> None:
    """In float32 and bfloat16, whose sums of three are added up in another order, so that bits
    differ; and where a rank has several stages, which wait for one another's sums and parts.
    """
    jobs = [
        job_of(tmp_path / "float32", (3, 1), dtype="float32"),
        job_of(tmp_path / "bfloat16", (2, 1), dtype="bfloat16"),
        *map(divided, ordered(tmp_path, ["interleaved"], "Skips", 2)),
        *map(divided, ordered(tmp_path, ["zb-v"], "Tied", 2, clip_norm=0.05, microbatches=5)),
    ]
    run_jobs([each for job in jobs for each in (job, whole(job))])
    for job, digits in zip(jobs, (1e-5, 0.02, 1e-12, 1e-12), strict=True):
        assert_alike(job, whole(job), digits)


@pytest.mark.thorough
@pytest.mark.slow
def test_replicas_of_meshes(tmp_path: Path) -> None:
    """Each device divides its part of the parameters with the same device of the other replicas;
    gradients of what all devices hold are added up over all of them first.
    """
    alike = {"optimizer": {"name": "AdamW", "args": {"lr": 0.02}}, "evaluate_every": None}
    cases = [
        Case("flush", (2, 1), ((2,), None), "flush", changes={"clip_norm": 0.3}),
        Case("stashing", (2, 2), ((2,), None), "weight-stashing", changes={"clip_norm": 0.3}),
        Case("batch", (2,), ((2,),), "flush", values={"input 0": "S(0)"}),
    ]
    model = captured("Perceptron")
    cases = [replace(case, changes=alike | {**case.changes}) for case in cases]
    jobs = [divided(sharded_job(tmp_path, "Perceptron", case, model)) for case in cases]
    run_jobs([each for job in jobs for each in (job, whole(job))])
    for job in jobs:
        assert_alike(job, whole(job))

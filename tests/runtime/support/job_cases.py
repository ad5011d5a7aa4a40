"""Jobs of pd-train for each kind of communicator: what trains so on one backend or device has to do
it on another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import small_models
import torch
from order_runs import ADAM, MOMENTUM, on_ranks, plan_of, prepare
from plans import cut, make_plan
from schedules import ORDERS
from sharded_runs import Case, captured, job_of
from training import losses, weights

from pipedream.capture.export import capture
from pipedream.runtime.run.job import Job

ALIKE = {"optimizer": MOMENTUM, "epochs": 1, "evaluate_every": None}


def straight(
    folder: Path,
    replicas: Sequence[int],
    schedules: Sequence[str],
    model: str = "Skips",
    **changes: object,
) -> list[Job]:
    """One stage on each rank."""
    config = prepare(folder, model, "zb-h1", [[0], [1]], **(ALIKE | changes))
    graph = capture(getattr(small_models, model)(), (torch.randn(4, 6),)).graph
    jobs = []
    for schedule in schedules:
        plan = make_plan(graph, cut(graph, len(replicas)), replicas, schedule)
        run = folder / f"{schedule} {replicas}"
        jobs.append(Job(plan, config, folder, run, schedule=schedule, epochs=config.epochs))
    return jobs


def ordered(
    folder: Path, orders: Sequence[str], model: str = "Skips", replicas: int = 1, **changes: object
) -> list[Job]:
    """Two ranks with two stages each, or two with one."""
    config = prepare(folder, model, "zb-h1", [[0], [1]], **(ALIKE | changes))
    jobs = []
    for order in orders:
        rank_map, each = ORDERS[order]
        ranks = on_ranks(rank_map(2, each), replicas)
        plan = plan_of(model, order, ranks, config.microbatches)
        run = folder / f"{order} {replicas}"
        jobs.append(Job(plan, config, folder, run, schedule="flush", epochs=config.epochs))
    return jobs


def on_meshes(folder: Path) -> list[Job]:
    cases = [
        Case("two meshes", (1, 1), ((2,), (2,)), "flush"),
        Case("replicas of meshes", (2, 1), ((2,), None), "weight-stashing"),
        Case("meshes of 3 and 2", (1, 1), ((3,), (2,)), "flush", changes={"clip_norm": 0.3}),
        Case("mesh 2x2", (1,), ((2, 2),), "flush", values={"input 0": "S(0),R"}),
    ]
    alike, whole = {"optimizer": ADAM, "evaluate_every": None}, captured("Perceptron")
    return [
        job_of(folder, "Perceptron", replace(case, changes=alike | {**case.changes}), whole)
        for case in cases
    ]


CASES: dict[str, Callable[[Path], Sequence[Job]]] = {
    "every schedule": lambda folder: straight(
        folder, (1, 1), ("weight-stashing", "flush", "gpipe", "2bw", "vertical-sync")
    ),
    "replicas": lambda folder: [
        *straight(folder, (1, 2, 1), ("weight-stashing", "flush")),
        *straight(folder, (2, 2), ("flush",), clip_norm=0.05),
    ],
    "divided updates": lambda folder: [
        *straight(folder, (1, 2, 1), ("weight-stashing", "2bw"), zero=True, microbatches=6),
        *straight(folder, (2, 2), ("flush",), clip_norm=0.05, zero=True, epochs=2),
        *ordered(folder, ["interleaved"], "Tied", 2, clip_norm=0.05, microbatches=5, zero=True),
    ],
    "evaluation": lambda folder: straight(
        folder, (1, 1, 1), ("flush",), evaluate_every=1, epochs=2
    ),
    "tied": lambda folder: straight(folder, (1, 1, 1), ("2bw",), "Tied", clip_norm=0.05),
    "orders": lambda folder: ordered(folder, ["zb-h1", "zb-v"]),
    "orders with replicas": lambda folder: ordered(
        folder, ["interleaved", "auto"], "Tied", 2, clip_norm=0.05, microbatches=5
    ),
    "meshes": on_meshes,
}

TYPES: dict[str, Callable[[Path], Sequence[Job]]] = {
    "bfloat16": lambda folder: straight(
        folder, (1, 1), ("weight-stashing",), "Normed", dtype="bfloat16", evaluate_every=1
    ),
    "float16": lambda folder: straight(
        folder, (1, 1), ("flush",), dtype="float32", autocast="float16", clip_norm=0.05
    ),
    "last minibatch": lambda folder: straight(
        folder, (2, 1), ("flush", "weight-stashing"), drop_last=False, epochs=2
    ),
}
"""What is computed in types of few digits, or in other shapes."""

_DIGITS = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.05}
"""Relative difference of losses: a device adds up in another order, and each step goes on from what
the one before came to."""


def assert_learned_alike(job: Job, other: Job) -> None:
    """The same losses, and weights and buffers in the last checkpoint, but for rounding."""
    config = job.config
    digits = 0.01 if config.autocast else _DIGITS[config.dtype]
    assert losses(other) == pytest.approx(losses(job), rel=digits)
    learned = weights(other)
    for name, tensor in weights(job).items():
        torch.testing.assert_close(learned[name], tensor, rtol=digits, atol=digits)


def on_gpus(jobs: Sequence[Job]) -> list[Job]:
    """The same, each rank on a GPU, in folders beside theirs."""
    return [
        replace(job, device="cuda", run=job.run.with_name(f"{job.run.name} on GPUs"))
        for job in jobs
    ]

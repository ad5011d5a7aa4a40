"""Runs of pd-train in the order that NCCL has (`strict_nccl`): none hangs, all learn as with gloo.

On NCCL every pipeline hung at its first minibatch: rank 0 posted the receive of a gradient, rank 1
that of an activation, and each waited to be connected by the other's send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import small_models
import strict_nccl
import torch
from order_runs import ADAM, MOMENTUM, plan_of, prepare
from plans import cut, make_plan
from sharded_runs import Case, captured, job_of
from training import losses, run_jobs

from pipedream.capture.export import capture
from pipedream.runtime.run.job import Job
from pipedream.schedule.orders.literature import loop, vee

ALIKE = {"optimizer": MOMENTUM, "epochs": 1, "evaluate_every": None}
ORDERS = {
    "interleaved": loop,
    "zb-h1": loop,
    "zb-h2": loop,
    "zb-v": vee,
    "v-half": vee,
    "v-min": vee,
    "auto": vee,
}


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
        each = 1 if order in ("zb-h1", "zb-h2") else 2
        ranks = [
            [replicas * place + k for k in range(replicas)] for place in ORDERS[order](2, each)
        ]
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


@pytest.mark.slow
@pytest.mark.parametrize("streams", [None, pytest.param(16, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("case", CASES)
def test_no_run_hangs_and_all_learn_as_with_gloo(
    tmp_path: Path, case: str, streams: int | None
) -> None:
    learned = []
    for name, setting in (("gloo", None), ("nccl", partial(strict_nccl.install, streams))):
        folder = tmp_path / name
        folder.mkdir()
        jobs = CASES[case](folder)
        run_jobs(jobs, prepare=setting)
        learned.append([losses(job) for job in jobs])
    assert learned[0] == learned[1]

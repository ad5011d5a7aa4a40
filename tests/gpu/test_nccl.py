"""Runs on NCCL, for a machine whose ranks have a GPU each: they learn what they do with gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_models
import torch
from order_runs import MOMENTUM, plan_of, prepare
from plans import cut, make_plan
from training import losses, run_jobs

from pipedream.capture.export import capture
from pipedream.runtime.run.job import Job

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="there are no two GPUs"),
]


def learn_alike(cpu: Job, gpu: Job) -> None:
    run_jobs([cpu])
    run_jobs([gpu])
    assert losses(gpu) == pytest.approx(losses(cpu), rel=1e-10)


@pytest.mark.parametrize("schedule", ["weight-stashing", "vertical-sync", "2bw", "flush", "gpipe"])
@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (2, 2)], ids=str)
def test_every_schedule(tmp_path: Path, schedule: str, replicas: tuple[int, ...]) -> None:
    if sum(replicas) > GPUS:
        pytest.skip(f"there are {GPUS} GPUs")
    changes = {"optimizer": MOMENTUM, "epochs": 1, "evaluate_every": None}
    config = prepare(tmp_path, "Skips", "zb-h1", [[0], [1]], **changes)
    graph = capture(small_models.Skips(), (torch.randn(4, 6),)).graph
    plan = make_plan(graph, cut(graph, len(replicas)), replicas, schedule)
    learn_alike(
        *(
            Job(plan, config, tmp_path, tmp_path / on, device=on, schedule=schedule, epochs=1)  # type: ignore[arg-type]
            for on in ("cpu", "cuda")
        )
    )


@pytest.mark.parametrize("order", ["interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min"])
def test_every_order(tmp_path: Path, order: str) -> None:
    places = {"interleaved": [0, 1, 0, 1], "zb-h1": [0, 1], "zb-h2": [0, 1]}
    ranks = [[place] for place in places.get(order, [0, 1, 1, 0])]
    changes = {"optimizer": MOMENTUM, "epochs": 1, "evaluate_every": 1}
    config = prepare(tmp_path, "Skips", "zb-h1", [[0], [1]], **changes)
    plan = plan_of("Skips", order, ranks, config.microbatches)
    learn_alike(
        *(
            Job(plan, config, tmp_path, tmp_path / on, device=on, schedule="flush", epochs=1)  # type: ignore[arg-type]
            for on in ("cpu", "cuda")
        )
    )

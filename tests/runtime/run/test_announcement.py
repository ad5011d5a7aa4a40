"""What a run says that it will do, before it trains."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from plans import make_plan

from pipedream.graph.model import Graph, Node
from pipedream.graph.run_config import (
    AsynchronousConfig,
    DataFactory,
    Factory,
    OptimizerConfig,
    RunConfig,
)
from pipedream.runtime.run.announcement import announced
from pipedream.runtime.run.job import Job


def job(schedule: str, replicas: tuple[int, ...] = (1, 1, 1), **more: Any) -> Job:
    names = ("a", "b", "c")[: len(replicas)]
    edges = tuple(pairwise(names))
    graph = Graph({name: Node(name, "Layer", 1.0) for name in names}, edges)
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="m:model"),
        data=DataFactory(source="m:data"),
        batch_size=8,
        **more,
    )
    plan = make_plan(graph, [[name] for name in names], replicas)
    return Job(plan, config, Path(), Path(), schedule=schedule)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            job("weight-stashing"),
            "weight-stashing: 80 updates an epoch, each of 8 examples; "
            "gradients are up to 2, 1, 0 updates late (stage by stage)",
        ),
        (
            job("flush", microbatches=4, clip_norm=1.0),
            "flush: 20 updates an epoch, each of 32 examples; no gradient is late; "
            "clip_norm is of the whole model",
        ),
        (
            job("weight-stashing", (2, 1), clip_norm=1.0),
            "weight-stashing: 40, 80 updates an epoch, each of 16, 8 examples; "
            "gradients are up to 1, 0 updates late (stage by stage); "
            "clip_norm is of each stage by itself",
        ),
        (
            job("2bw", (1, 1), microbatches=3),
            "2bw: 27 updates an epoch, each of 24 examples; "
            "gradients are up to 1, 1 updates late (stage by stage)",
        ),
        (
            job("weight-stashing", (1,)),
            "weight-stashing: 80 updates an epoch, each of 8 examples; no gradient is late",
        ),
    ],
)
def test_updates_examples_and_late_gradients(asked: Job, said: str) -> None:
    """A change of the schedule silently made 20 updates of 80."""
    assert dict(announced(asked, 80, None))["training"] == said


ADAM = OptimizerConfig(name="AdamW")


def test_a_correction_is_recommended_where_one_was_measured() -> None:
    """Of late gradients only, and where the config has none."""
    late = dict(announced(job("2bw", (1, 1), microbatches=2, optimizer=ADAM), 80, None))["advice"]
    assert late.startswith("asynchronous: {error_feedback: true} corrects for late gradients")
    corrected = AsynchronousConfig(error_feedback=True)
    for silent in (
        job("2bw", (1, 1), microbatches=2, optimizer=ADAM, asynchronous=corrected),
        job("flush", (1, 1), optimizer=ADAM),
        job("weight-stashing", (1,), optimizer=ADAM),
        job("weight-stashing", (1, 1), optimizer=OptimizerConfig(name="Rprop")),
    ):
        assert [title for title, _ in announced(silent, 80, None)] == ["training"]


def test_who_learns_what_is_said_after_the_updates() -> None:
    titles = [title for title, _ in announced(job("flush"), 80, "Muon for 4 matrices")]
    assert titles == ["training", "optimizer"]

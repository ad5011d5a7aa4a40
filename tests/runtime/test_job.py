"""What a job refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import make_plan

from pipedream.graph.command import UserError
from pipedream.graph.config import Factory, RunConfig
from pipedream.graph.model import Graph, Node
from pipedream.runtime.job import Job


def job(microbatches: int, schedule: str) -> Job:
    names = ("a", "b", "c")
    graph = Graph({name: Node(name, "Layer", 1.0) for name in names}, (("a", "b"), ("b", "c")))
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="m:model"),
        data=Factory(source="m:data"),
        batch_size=4,
        microbatches=microbatches,
    )
    plan = make_plan(graph, [["a"], ["b"], ["c"]], (4, 3, 1))
    return Job(plan, config, Path(), Path(), schedule=schedule)  # type: ignore[arg-type]


def test_2bw_needs_as_many_microbatches_as_are_in_flight() -> None:
    """Four replicas with two minibatches each."""
    job(8, "2bw").check_microbatches()
    with pytest.raises(UserError, match=r"need at least 8, .* write microbatches: 8 or more"):
        job(7, "2bw").check_microbatches()
    for schedule in ("flush", "gpipe", "weight-stashing", "vertical-sync"):
        job(1, schedule).check_microbatches()

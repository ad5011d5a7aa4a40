"""What a job refuses before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plans import make_plan

from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node
from pipedream.graph.run_config import DataFactory, Factory, RunConfig
from pipedream.runtime.run.job import Job


def job(microbatches: int, schedule: str, **more: Any) -> Job:
    names = ("a", "b", "c")
    graph = Graph({name: Node(name, "Layer", 1.0) for name in names}, (("a", "b"), ("b", "c")))
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="m:model"),
        data=DataFactory(source="m:data"),
        batch_size=4,
        microbatches=microbatches,
        **more,
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


def test_a_scale_of_the_loss_is_found_only_where_all_stages_know_it_in_time() -> None:
    for schedule in ("flush", "gpipe"):
        job(8, schedule, autocast="float16").check_scale()
    for schedule in ("weight-stashing", "vertical-sync", "2bw"):
        job(8, schedule, autocast="float16", loss_scale=1024.0).check_scale()
        job(8, schedule, autocast="bfloat16").check_scale()
        with pytest.raises(UserError, match=f"schedule {schedule}: .* has to say the loss_scale"):
            job(8, schedule, autocast="float16").check_scale()

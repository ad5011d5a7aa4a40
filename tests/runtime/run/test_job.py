"""What a job refuses before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import make_plan

from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node
from pipedream.graph.run_config import (
    AsynchronousConfig,
    BasisRotationConfig,
    DataFactory,
    Factory,
    GroupConfig,
    OptimizerConfig,
    RunConfig,
)
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


def divided(**more: Any) -> Job:
    return job(8, "weight-stashing", zero=True, **more)


def test_the_optimizers_state_is_divided_only_where_that_changes_nothing() -> None:
    divided().check_zero()
    assert [divided().divides_updates(stage) for stage in range(3)] == [True, True, False]
    for name in ("Adafactor", "Muon", "Lion"):
        groups = (GroupConfig(match=("*",), name=name),)
        for optimizer in (OptimizerConfig(name=name), OptimizerConfig(groups=groups)):
            with pytest.raises(UserError, match=f"^zero: replicas update parts .* and {name} may"):
                divided(optimizer=optimizer).check_zero()
            job(8, "weight-stashing", optimizer=optimizer).check_zero()
    predicting = AsynchronousConfig(weight_prediction=True)
    with pytest.raises(UserError, match=r"^zero: .* weight_prediction needs all: write zero: fa"):
        divided(asynchronous=predicting).check_zero()
    rotating = AsynchronousConfig(basis_rotation=BasisRotationConfig())
    with pytest.raises(UserError, match=r"^zero: .* basis_rotation needs whole matrices: write"):
        divided(asynchronous=rotating, optimizer=OptimizerConfig(name="Adam")).check_zero()
    turned = divided()
    stages = [turned.plan.stages[0].model_copy(update={"ranks": (1, 0, 2, 3)})]
    plan = turned.plan.model_copy(update={"stages": (*stages, *turned.plan.stages[1:])})
    with pytest.raises(UserError, match=r"^zero: the plan does not have the ranks of each"):
        replace(turned, plan=plan).check_zero()


def test_the_plan_says_which_stages_divide_it_unless_the_config_does() -> None:
    planned = job(8, "flush")
    stages = (each.model_copy(update={"zero": each.stage == 1}) for each in planned.plan.stages)
    planned = replace(planned, plan=planned.plan.model_copy(update={"stages": tuple(stages)}))
    for asked, expected in ((None, [False, True]), (False, [False] * 2), (True, [True] * 2)):
        config = planned.config.model_copy(update={"zero": asked})
        changed = replace(planned, config=config)
        assert [changed.divides_updates(stage) for stage in range(2)] == expected


def test_a_scale_of_the_loss_is_found_only_where_all_stages_know_it_in_time() -> None:
    for schedule in ("flush", "gpipe"):
        job(8, schedule, autocast="float16").check_scale()
    for schedule in ("weight-stashing", "vertical-sync", "2bw"):
        job(8, schedule, autocast="float16", loss_scale=1024.0).check_scale()
        job(8, schedule, autocast="bfloat16").check_scale()
        with pytest.raises(UserError, match=f"schedule {schedule}: .* has to say the loss_scale"):
            job(8, schedule, autocast="float16").check_scale()

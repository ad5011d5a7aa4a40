"""Shardings that pd-optimize finds, from the profile on, and runs of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commands import typed
from sharded_runs import PROFILE, write_config
from training import run_jobs

from pipedream.graph.placements.placement import device_count
from pipedream.graph.plan import Plan, read_plan
from pipedream.runtime.run.job import Job

FAST = ("--bandwidth", "1TB")
"""Links so fast that everything is worth dividing."""


def profiled(folder: Path, model: str, **changes: Any) -> None:
    write_config(folder, model, microbatches=2, evaluate_every=None, **changes)
    done = typed(folder, PROFILE)
    assert done.code == 0, done.error


def planned(folder: Path, *options: str, name: str = "plan", schedule: str = "flush") -> Plan:
    if schedule != "weight-stashing":
        options = (*options, "--microbatches", "2")
    words = ["pd-optimize", "graph.txt", *FAST, "--schedule", schedule, "-o", name, *options]
    done = typed(folder, words)
    assert done.code == 0, done.error
    return read_plan(folder / name / "plan.json")


def divisions(plan: Plan) -> list[str]:
    """The strategies of the plan that divide something."""
    return [
        text
        for stage in plan.stages
        if stage.placements is not None
        for each in stage.placements.operators
        for text in (*each.forward, *each.backward)
        if "S(" in text
    ]


def without_meshes(plan: Plan) -> Plan:
    """The same stages and replicas, each replica on one device."""
    data, first = plan.model_dump(exclude_none=True), 0
    for planned_stage in data["stages"]:
        count = len(planned_stage["ranks"]) // device_count(planned_stage.pop("mesh", ()))
        planned_stage.pop("placements", None)
        planned_stage["ranks"] = tuple(range(first, first := first + count))
    data["cluster"] = {"machines": (first,), "bandwidth": plan.cluster.bandwidth[:1]}
    return Plan.model_validate(data)


def train_plans(folder: Path, model: str, plans: Mapping[str, Plan], **changes: Any) -> None:
    """Each in a folder by its name, in the same processes."""
    if any(plan.schedule != "weight-stashing" for plan in plans.values()):
        changes["microbatches"] = 2
    config = write_config(folder, model, evaluate_every=None, **changes)
    jobs = [
        Job(plan, config, folder, folder / name, schedule=plan.schedule, epochs=1)
        for name, plan in plans.items()
    ]
    for job in jobs:
        job.check()
    run_jobs(jobs)

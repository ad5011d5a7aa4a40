"""Planning again with pd-optimize when there are fewer workers than the plan has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch._C._distributed_c10d import Store

from pipedream.comm.rank_info import RankInfo
from pipedream.comm.store_messages import broadcast
from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan, Stage, moved, read_plan
from pipedream.graph.units import show_seconds
from pipedream.runtime.run.job import Job


def replanned(job: Job, rank_info: RankInfo, store: Store) -> tuple[Job, RankInfo]:
    """Returns the job under a plan for the workers there are, and this rank's number in it.

    Rank 0 plans and sends the plan to the others; it is kept in the run folder, as `plan-3` for 3
    workers. The plan uses the first ranks. All ranks raise UserError if there is no such plan, for
    example if nothing fits into the memory of so few workers.
    """
    answer = broadcast(
        store, rank_info, "plan", _planned(job, rank_info) if rank_info.rank == 0 else None
    )
    if "error" in answer:
        raise UserError(answer["error"])
    plan = Plan.model_validate_json(answer["plan"])
    replanned_job = replace(job, plan=plan, plan_folder=_folder(job, rank_info.world_size))
    replanned_job.check_microbatches()
    here = min(rank_info.local_world_size, plan.workers)
    return replanned_job, replace(rank_info, world_size=plan.workers, local_world_size=here)


def _planned(job: Job, rank_info: RankInfo) -> dict[str, str]:
    try:
        return {"plan": _plan(job, rank_info.world_size).model_dump_json()}
    except UserError as error:
        return {"error": error.format_message()}


def _plan(job: Job, workers: int) -> Plan:
    """Runs pd-optimize in a process of its own. Raises UserError."""
    assert job.replan is not None
    graph, folder = job.replan.with_name("graph.txt"), _folder(job, workers)
    options = ["--like", str(job.replan), "--workers", str(workers), "-o", str(folder)]
    if all(stage.mesh is None for stage in job.plan.stages):
        options += ["--intra-op", "none"]  # the run config may be for whole stages alone
    why = run_pd_optimize(graph, options)
    if why is not None:
        raise UserError(f"--replan for {workers} of {job.plan.workers} workers: {why}")
    path = folder / "plan.json"
    plan = read_plan(path)
    idle = f", {workers - plan.workers} idle" if plan.workers < workers else ""
    print(
        f"pd-train: planned again for {workers} of {job.plan.workers} workers: {_words(plan)} per "
        f"minibatch{idle}, before {_words(job.plan)}; {path}",
        file=sys.stderr,
        flush=True,
    )
    return moved(plan, folder, job.run)


def _folder(job: Job, workers: int) -> Path:
    return job.run / f"plan-{workers}"


def run_pd_optimize(
    graph: Path,
    options: Sequence[str],
    started: Callable[[subprocess.Popen[str]], object] = lambda process: None,
) -> str | None:
    """Runs it in a process of its own, for which `started` is called. Returns what it says it
    fails of, in one line; None if it does not.
    """
    command = [sys.executable, "-P", "-m", "pipedream.optimizer.cli.command", str(graph), *options]
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, stdin=none, stdout=none, stderr=pipe, text=True) as process:
        started(process)
        _, errors = process.communicate()
    if not process.returncode:
        return None
    *_, last = errors.strip().splitlines() or [f"exit code {process.returncode}"]
    return last.removeprefix("pd-optimize: ")


def plan_in_words(plan: Plan) -> str:
    """Returns the workers of each stage."""
    return " + ".join(map(_workers, plan.stages))


def _words(plan: Plan) -> str:
    return f"{plan_in_words(plan)} at {show_seconds(plan.predicted.seconds_per_minibatch)}"


def _workers(stage: Stage) -> str:
    mesh = "" if stage.mesh is None else f" of {' x '.join(map(str, stage.mesh))} devices"
    return f"{stage.replicas}{mesh}"

"""One rank's whole run: set up, meet the other ranks, train, report."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch.distributed as dist
from filelock import FileLock, Timeout

from pipedream.capture.compute_settings import keep_freed_memory, return_freed_memory
from pipedream.comm.messages import PeerLost
from pipedream.comm.rank_info import RankInfo
from pipedream.comm.rendezvous import RendezvousError, connect_store
from pipedream.graph.command import remove_unfinished
from pipedream.graph.errors import UserError
from pipedream.runtime.checkpoint import files as checkpoint
from pipedream.runtime.epochs import train_epochs
from pipedream.runtime.held_out import EvaluationContext, evaluate_only
from pipedream.runtime.local.local_model import LocalModel
from pipedream.runtime.rank_context import RankContext
from pipedream.runtime.run.announcement import announced
from pipedream.runtime.run.job import CHECKPOINTS, Job
from pipedream.runtime.run_end import finish
from pipedream.runtime.supervise.heartbeat import Heartbeats
from pipedream.runtime.supervise.replan import replanned
from pipedream.runtime.supervise.retune import forget_earlier, retuned


class Stopped(Exception):
    """The run was asked to stop, and has saved; the message says where."""


class Retuned(Exception):
    """The run has saved, to be started again under another plan."""


def train(job: Job, rank_info: RankInfo, heartbeats: Heartbeats | None = None) -> None:
    """Trains as this rank; `heartbeats` is there if pd-train's launcher started it.

    Raises UserError, PeerLost if other ranks are lost, Stopped after a graceful stop, Retuned where
    the run is to be started again.
    """
    planned, started = job.plan.workers, rank_info.world_size
    if started > planned or (started < planned and job.replan is None):
        raise UserError(
            f"the plan is for {planned} workers and {started} were started: start {planned}, "
            "fewer with --replan, or make another plan with pd-optimize"
        )
    return_freed_memory()
    # A run that goes on in the folder may be evaluated meanwhile.
    with locked(job.run) if rank_info.rank == 0 and not job.evaluate_only else nullcontext():
        try:
            store = None
            if job.retune is not None and rank_info.rank == 0 and not job.restarted:
                forget_earlier(job)
            if job.retune is not None and job.restarted:
                store = connect_store(rank_info, job.timeout)
                job, rank_info = retuned(job, rank_info, store)
            if started < job.plan.workers:
                store = store or connect_store(rank_info, job.timeout)
                job, rank_info = replanned(job, rank_info, store)
            if rank_info.rank < job.plan.workers:
                kind = EvaluationContext if job.evaluate_only else RankContext
                _watched(kind(LocalModel(job, rank_info), heartbeats, store))
        except RendezvousError as error:
            raise PeerLost(str(error)) from error
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise PeerLost("the store of the ranks does not answer any more") from error


def _watched(context: RankContext) -> None:
    watchdog = context.watchdog
    try:
        _run(context)
    except PeerLost as error:
        if watchdog is None:
            raise
        raise PeerLost(watchdog.explained(error), error.peer) from error
    if watchdog is not None:
        watchdog.end()  # else those who lose this one hear what it was doing


def _run(context: RankContext) -> None:
    local = context.local
    keep_freed_memory()
    if local.job.evaluate_only:
        evaluate_only(context)
        dist.destroy_process_group()
        return
    if local.rank_info.rank == 0:
        for title, line in announced(local.job, local.examples.minibatches, local.learners):
            print(f"{title}: {line}", file=sys.stderr, flush=True)
    gc.freeze()  # what is there stays; to look through it again and again takes long
    try:
        with nullcontext() if context.display is None else context.display:
            stopped = train_epochs(context)
        if stopped is None:
            finish(context)
    finally:
        if context.retuner is not None:
            context.retuner.end()
        context.writers.end(None)
        gc.unfreeze()  # else Python cannot take its modules down, and libraries report what leaks
    dist.destroy_process_group()
    if stopped is not None and context.changes_plan:
        raise Retuned
    if stopped is not None:
        where = context.local.job.checkpoints / str(stopped)
        raise Stopped(f"saved {where}; go on with --resume")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Creates the folder and keeps other runs out of it until the block or this process ends.

    What runs that were killed have left there half done is deleted. Forked processes do not inherit
    the lock. Raises UserError if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", blocking=False)
    try:
        with lock:
            remove_unfinished(folder)
            checkpoint.remove_unfinished(folder / CHECKPOINTS)
            yield
    except Timeout as error:
        raise UserError(
            f"-o {folder}: another run is at work in this folder; wait, or give another folder"
        ) from error

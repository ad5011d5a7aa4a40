"""Runs of pd-train's own code in real processes, one after the other in the same processes."""

from __future__ import annotations

import copy
import gc
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import torch
from processes import free_port, run_processes
from torch import Tensor

from pipedream.comm.rank_info import RankInfo
from pipedream.graph.run_config import DataFactory, Factory, OptimizerConfig, RunConfig
from pipedream.runtime.checkpoint.files import latest, load_all
from pipedream.runtime.data.examples import Examples
from pipedream.runtime.local import local_model
from pipedream.runtime.local.captures import Captures, capture_all
from pipedream.runtime.run.job import Job
from pipedream.runtime.trainer import train

_FIRST = RankInfo(0, 1, 0, 1, "", 0)


def run_jobs(
    jobs: Sequence[Job],
    seconds: float | None = None,
    prepare: Callable[[], None] | None = None,
) -> None:
    """Trains each job; one of few workers on the first of the processes.

    `prepare` is called in the process that they are forked from. `seconds` to do it in: on an idle
    machine some jobs on meshes take twenty each.
    """
    seconds = seconds or min(280.0, 60.0 + 40.0 * len(jobs))
    ports = [free_port() for _ in jobs]
    run_processes(_capture_and_train, 1, jobs, ports, seconds, prepare, seconds=seconds)


def _capture_and_train(
    _: int,
    __: int,
    jobs: Sequence[Job],
    ports: Sequence[int],
    seconds: float,
    prepare: Callable[[], None] | None,
) -> None:
    """Captures what all ranks would, and forks them."""
    if prepare is not None:
        prepare()
    most = max(job.plan.workers for job in jobs)
    with capturing_once() as capture_once:
        for job in jobs:
            if not _evaluates(job):
                capture_once(job)
        run_processes(_train_all, most, jobs, ports, seconds=seconds, fork=True)


def _train_all(rank: int, _: int, jobs: Sequence[Job], ports: Sequence[int]) -> None:
    # The commands' own tests look at the picture.
    with patch("pipedream.runtime.report.recording.draw"):
        for job, port in zip(jobs, ports, strict=True):
            workers = job.plan.workers
            if rank < workers:
                if rank:
                    _wait_for(port)
                gc.freeze()  # a run ends with unfreezing all that the process has ever imported
                train(job, RankInfo(rank, workers, rank, workers, "127.0.0.1", port))


def _wait_for(port: int) -> None:
    """Until rank 0 listens; torch would look again after a second."""
    while True:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.01)


def _evaluates(job: Job) -> bool:
    return job.evaluate and job.config.evaluate_every is not None


@contextmanager
def capturing_once() -> Iterator[Callable[[Job], object]]:
    """In here runs that differ in plan, schedule and optimizer alone share a capture of the model,
    which takes most of a small run's time. Each gets a copy, as it was before anyone trained it.
    """
    untouched: dict[str, tuple[Captures, Tensor]] = {}

    def captures(
        job: Job, examples: Examples | None = None, rank_info: RankInfo = _FIRST
    ) -> Captures:
        config = job.config.model_copy(update={"optimizer": None, "microbatches": None})
        key = repr((job.plan if _evaluates(job) else None, job.directory, config))
        if key not in untouched:
            examples = examples or Examples(job, torch.device("cpu"))
            untouched[key] = capture_all(job, examples, rank_info), torch.get_rng_state()
        elif examples is not None:
            examples.first()  # the others have to be of its kind
        captured, state = untouched[key]
        torch.set_rng_state(state)
        return copy.deepcopy(captured)

    if torch.version.cuda is None:
        with patch.object(local_model, "capture_all", captures):
            yield captures
    else:  # no process can be forked off one that has gone backward
        yield lambda job: None


def chain_config(optimizer: OptimizerConfig) -> RunConfig:
    """A run of small_models' Chain on its regression, in minibatches of 4."""
    return RunConfig(
        format="pipedream-run/1",
        model=Factory(source="small_models:Chain"),
        data=DataFactory(source="small_models:regression"),
        loss="mse_loss",
        optimizer=optimizer,
        batch_size=4,
    )


def losses(job: Job) -> list[float]:
    """The loss of every minibatch, from metrics.jsonl."""
    lines = (job.run / "metrics.jsonl").read_text().splitlines()
    return [float(json.loads(line)["loss"]) for line in lines]


def weights(job: Job) -> dict[str, Tensor]:
    """All parameters and buffers of the newest checkpoint."""
    path = latest(Path(job.run) / "checkpoints")
    assert path is not None
    return load_all(path)

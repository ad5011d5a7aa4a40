"""Runs that are asked to stop: on every schedule they drain at once and save what they have."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import small_models
import torch
from commands import PROGRAMS, interrupt, start
from plans import cut, make_plan
from processes import free_port, run_processes
from schedules import policy
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed import DistNetworkError
from training import chain_config, losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.comm.rank_info import RankInfo
from pipedream.graph.choices import SCHEDULES, ScheduleName
from pipedream.graph.plan import Plan, write_plan
from pipedream.graph.run_config import AsynchronousConfig, DataFactory, OptimizerConfig
from pipedream.runtime.checkpoint.files import load_all, publish
from pipedream.runtime.run.action_stream import ActionStream
from pipedream.runtime.run.job import Job
from pipedream.runtime.run.training_segment import Position, TrainingSegment
from pipedream.runtime.supervise.graceful_stop import GracefulStop
from pipedream.runtime.trainer import Stopped, train
from pipedream.schedule.action import Action, Kind

SUPPORT = Path(small_models.__file__).parent
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=3", "--no-python")
MINIBATCHES = 60
CASES: list[tuple[ScheduleName, bool]] = [
    *((name, False) for name in SCHEDULES),
    ("weight-stashing", True),
]


def plan_for(replicas: tuple[int, ...], schedule: ScheduleName) -> Plan:
    graph = capture(small_models.Chain(), (torch.randn(4, 6),)).graph
    return make_plan(graph, cut(graph, len(replicas)), replicas, schedule)


def job_for(schedule: ScheduleName, predicts: bool, run: Path) -> Job:
    config = chain_config(OptimizerConfig(name="AdamW", args={"lr": 0.01})).model_copy(
        update={
            "asynchronous": AsynchronousConfig(weight_prediction=predicts),
            "microbatches": 6 if schedule in ("2bw", "flush", "gpipe") else 1,
            "data": DataFactory(
                source="interrupting:interrupting",
                args={"examples": 4 * MINIBATCHES, "after": 40},
            ),
        }
    )
    plan = plan_for((2, 1), schedule)
    return Job(plan, config, SUPPORT, run, schedule=schedule, epochs=2, evaluate=False)


def quiet(job: Job) -> Job:
    """The same, with nobody who interrupts."""
    data = DataFactory(source="small_models:regression", args={"examples": 4 * MINIBATCHES})
    return replace(job, config=job.config.model_copy(update={"data": data}))


def interrupted(rank: int, workers: int, jobs: Sequence[Job], ports: Sequence[int]) -> list[str]:
    words = []
    for job, port in zip(jobs, ports, strict=True):
        with pytest.raises(Stopped) as stopped:
            train(job, RankInfo(rank, workers, rank, workers, "127.0.0.1", port))
        words.append(str(stopped.value))
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    return words


@pytest.mark.thorough
@pytest.mark.slow
def test_a_stopped_run_is_one_whose_leg_ended_there(tmp_path: Path) -> None:
    """Two replicas and a stage of one. Each schedule stops in the middle of the epoch; what it has
    saved is, bit for bit, what a run saves there that had a segment so long.
    """
    jobs = [job_for(*case, tmp_path / f"{number}") for number, case in enumerate(CASES)]
    ports = [free_port() for _ in jobs]
    results = run_processes(interrupted, 3, jobs, ports, seconds=200)
    assert results[0] == results[1] == results[2]
    references = []
    for job, words in zip(jobs, results[0], strict=True):
        assert job.saved is not None
        assert job.saved.epoch == 0, f"{job.schedule}: not at once"
        assert 10 <= job.saved.minibatch < 50, f"{job.schedule}: not at once"
        assert words == f"saved {job.checkpoints / str(job.saved)}; go on with --resume"
        assert len(losses(job)) == job.saved.minibatch
        reference = replace(quiet(job), run=Path(f"{job.run}-reference"), epochs=1)
        references.append(replace(reference, save_every=job.saved.minibatch))
    run_jobs([*references, replace(quiet(jobs[0]), resume=True)], seconds=200)
    assert jobs[0].saved == Position(2)
    assert len(losses(jobs[0])) == 2 * MINIBATCHES
    for job, reference in zip(jobs, references, strict=True):
        until = reference.save_every
        assert losses(job)[:until] == losses(reference)[:until]
        name = str(Position(0, until or 0))
        expected, found = (load_all(each.checkpoints / name) for each in (reference, job))
        assert expected.keys() == found.keys()
        for parameter, tensor in expected.items():
            torch.testing.assert_close(found[parameter], tensor, rtol=0, atol=0)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_stopped_flush_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """It empties the pipeline after every update as it is."""
    job = job_for("flush", False, tmp_path / "run")
    run_processes(interrupted, 3, [job], [free_port()])
    whole = replace(quiet(job), run=tmp_path / "whole")
    run_jobs([whole, replace(quiet(job), resume=True)])
    assert losses(job) == losses(whole)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(job)[name], tensor, rtol=0, atol=0)


@pytest.mark.thorough
@pytest.mark.slow
def test_asked_while_held_out_data_are_tried_it_stops_before_the_next_epoch(tmp_path: Path) -> None:
    job = job_for("weight-stashing", False, tmp_path / "run")
    data = DataFactory(
        source="interrupting:interrupting_trial", args={"examples": 4 * MINIBATCHES, "after": 8}
    )
    config = job.config.model_copy(update={"data": data, "evaluate_every": 1})
    job = replace(job, config=config, evaluate=True)
    results = run_processes(interrupted, 3, [job], [free_port()])
    assert job.saved == Position(1)
    assert results[0] == [f"saved {job.checkpoints / 'epoch-0001'}; go on with --resume"]
    assert len(losses(job)) == MINIBATCHES
    held_out = (job.run / "held_out.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in held_out] == [1]


def left_with(rank: int, workers: int, job: Job, port: int) -> Position | None:
    """What is saved when this rank leaves, where the checkpoint takes its time to be made valid."""

    def slowly(*given: Any) -> None:
        time.sleep(0.5)
        publish(*given)

    with patch("pipedream.runtime.checkpoint.files.publish", slowly), pytest.raises(Stopped):
        train(job, RankInfo(rank, workers, rank, workers, "127.0.0.1", port))
    return job.saved


@pytest.mark.slow
def test_nobody_leaves_before_all_is_saved(tmp_path: Path) -> None:
    """mpirun ends all other ranks when one leaves with an exit code that is not 0."""
    job = job_for("weight-stashing", False, tmp_path / "run")
    results = run_processes(left_with, 3, job, free_port())
    assert results == [job.saved] * 3


def whole_segment(segment: TrainingSegment) -> ActionStream:
    return ActionStream(
        segment, [Action(Kind.FORWARD, 0, 0, b, 0) for b in range(segment.begin, segment.end)]
    )


@pytest.mark.thorough
@pytest.mark.slow
def test_all_ranks_try_the_held_out_data_or_none(tmp_path: Path) -> None:
    """Rank 0 tries them already when it is asked to stop, and rank 1 has yet to save the epoch."""
    store, asked = FileStore(str(tmp_path / "store"), 1), threading.Event()
    ranks = [
        GracefulStop(
            store, RankInfo(rank, 2, rank, 2, "", 0), policy("flush", (1, 1)), asked.is_set
        )
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.begin_segment(0, TrainingSegment(0, 10), whole_segment) is not None
    end, onward = Position(0, 10), Position(1)
    assert not ranks[0].stops_at(end, onward)
    asked.set()
    for rank in ranks:
        rank.thread.join(20)
        assert rank.at == onward
    assert not ranks[1].stops_at(end, onward)
    for rank in ranks:
        assert rank.begin_segment(1, TrainingSegment(0, 10), whole_segment) is None


def test_it_says_which_signal_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = FileStore(str(tmp_path / "store"), 1)
    graceful_stop = GracefulStop(store, RankInfo(0, 1, 0, 1, "", 0), policy("flush", (1,)), None)
    graceful_stop.begin_segment(0, TrainingSegment(0, 10), whole_segment)
    os.kill(os.getpid(), signal.SIGUSR1)
    graceful_stop.thread.join(20)
    results = "got SIGUSR1; draining the pipeline and saving; once more to leave at once"
    assert capsys.readouterr().err == f"pd-train: {results}\n"


class Gone:
    """A store that went with the rank that kept it."""

    def clone(self) -> Gone:
        return self

    def set(self, key: str, value: str) -> None:
        raise DistNetworkError(f"{key}: nobody answers")


def test_a_rank_that_cannot_ask_where_to_stop_goes_on() -> None:
    """The next message tells it whom it has lost; held, it would wait for ever."""
    rank_info = RankInfo(1, 2, 1, 2, "", 0)
    graceful_stop = GracefulStop(
        cast("Store", Gone()), rank_info, policy("flush", (1, 1)), lambda: True
    )
    stream = graceful_stop.begin_segment(0, TrainingSegment(0, 10), whole_segment)
    graceful_stop.thread.join(20)
    assert stream is not None
    assert not stream.on_hold
    assert not graceful_stop.on_hold
    assert graceful_stop.at is None


@pytest.mark.thorough
@pytest.mark.slow
def test_ctrl_c_under_torchrun(tmp_path: Path) -> None:
    """torchrun passes it on to all ranks, and to the processes that read their data; they leave
    before it loses its patience.
    """
    job = quiet(job_for("weight-stashing", False, tmp_path / "run"))
    write_plan(job.plan, tmp_path / "plan.json")
    config = job.config.model_dump(mode="json", exclude_none=True) | {
        "epochs": 500,
        "data_workers": 1,
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    words = [*TORCHRUN, "pd-train", "plan.json", "--config", "run.yaml", "-o", "run"]
    path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
    process = start(tmp_path, words, {"PATH": path, "PYTHONPATH": str(SUPPORT)})
    error = interrupt(process, tmp_path / "run")
    ours = [line for line in error.splitlines() if line.startswith("pd-train:")]
    assert ours == [
        "pd-train: interrupted; draining the pipeline and saving; Ctrl-C again to leave at once",
        f"pd-train: saved run/checkpoints/{job.saved}; go on with --resume",
    ]
    assert job.saved is not None
    assert len(losses(job)) == MINIBATCHES * job.saved.epoch + job.saved.minibatch

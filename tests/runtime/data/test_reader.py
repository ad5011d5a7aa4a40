"""Minibatches read beside the compute: by processes that die, by a thread that never comes back."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import small_models
import torch
from plans import cut, make_plan
from torch import Tensor
from training import losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import DataFactory, Factory, OptimizerConfig, RunConfig
from pipedream.runtime.data.reader import DataLost, Epoch, Reader
from pipedream.runtime.run.job import Job


class Deadly:
    """Kills the process that reads example 3."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(2), 0


class Stuck(Deadly):
    """Waits at example 5 until `go` is set."""

    go = threading.Event()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.go.wait(60 if index == 5 else 0.01)
        return torch.zeros(2), 0


class Plain(Deadly):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(2), 0


def reader(dataset: Deadly, data_workers: int, targets_only: bool = False) -> Reader:
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="a:b"),
        data=DataFactory(source="a:b"),
        batch_size=1,
        data_workers=data_workers,
    )
    epoch = Epoch(dataset, config, 0, torch.device("cpu"), draws=False, order=range(8))
    return Reader(epoch, range(8), targets_only)


@pytest.mark.parametrize("data_workers", [0, 1])
def test_a_rank_that_reads_targets_alone_keeps_no_inputs(data_workers: int) -> None:
    """The last stage kept the images of four minibatches, of which it reads none."""
    with reader(Plain(), data_workers, targets_only=True) as data:
        assert data.target(0).tolist() == [0]
        assert data.peek(1).inputs == ()
        with pytest.raises(UserError):
            data.inputs(1, [0])


@pytest.mark.slow
def test_a_process_that_dies_is_noticed_where_its_data_is_asked_for() -> None:
    """Torch's own handler raises anywhere: a pass or a message was then taken to be at fault."""
    with reader(Deadly(), data_workers=1) as data:
        time.sleep(0.5)  # it is dead by then
        with pytest.raises(DataLost):
            list(map(data.target, range(8)))


def test_the_processes_end_with_the_epoch_that_they_read() -> None:
    """They stayed, beside those of the next epoch, until a collection found the loader."""
    with reader(Plain(), data_workers=1) as data:
        list(map(data.target, range(8)))
        assert multiprocessing.active_children()
    assert not multiprocessing.active_children()


def test_a_dataset_that_never_comes_back_keeps_nobody_from_leaving() -> None:
    """A rank that had lost another one waited for its own data for ever."""
    begin = time.monotonic()
    with reader(Stuck(), data_workers=0) as data:
        for minibatch in range(4):
            data.inputs(minibatch, [0])
        time.sleep(0.1)
        assert any(thread.name == "data" for thread in threading.enumerate())
    assert time.monotonic() - begin < 30
    Stuck.go.set()


class Noted(Plain):
    """Says which thread read each example; reading takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.threads = seconds, list[str]()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.threads.append(threading.current_thread().name)
        time.sleep(self.seconds)
        return torch.zeros(2), index


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_a_thread_reads_what_takes_long(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread read everything: handing over took longer than a minibatch of numbers in memory."""
    monkeypatch.setattr("pipedream.runtime.data.reader._HANDING_OVER", 0.05)
    dataset = Noted(seconds)
    with reader(dataset, data_workers=0) as data:
        read = [int(data.target(number)) for number in range(8)]
    assert read == list(range(8))
    threads = ["MainThread"] * 3 + ["data"] * 5 if seconds else ["MainThread"] * 8
    assert dataset.threads == threads


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(1, 1), (2, 1)])
def test_a_run_on_a_stream_goes_on_at_the_same_example(
    replicas: tuple[int, int], tmp_path: Path
) -> None:
    """Stopped in the middle of an epoch, and between two: bit for bit the run that was not."""
    graph = capture(small_models.Noisy(), (torch.randn(4, 6),)).graph
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="small_models:Noisy"),
        data=DataFactory(source="small_models:drawn", examples=48),
        optimizer=OptimizerConfig(name="SGD", args={"lr": 0.1, "momentum": 0.9}),
        batch_size=4,
    )
    plan = make_plan(graph, cut(graph, 2), replicas)
    support = Path(small_models.__file__).parent
    whole = Job(plan, config, support, tmp_path / "whole", epochs=3, save_every=4)
    run_jobs([whole])
    kept = sorted(path.name for path in whole.checkpoints.glob("epoch-*"))
    expected, told = weights(whole), losses(whole)
    for number, last in enumerate((2, 4)):
        parts = replace(whole, run=tmp_path / f"parts{number}", resume=True)
        shutil.copytree(whole.run, parts.run, symlinks=True)
        for name in kept[last:]:
            shutil.rmtree(parts.checkpoints / name)
        run_jobs([parts])
        assert losses(parts) == told
        for name, tensor in weights(parts).items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)

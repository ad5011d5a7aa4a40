"""Replicas whose rounding differs part, where an optimizer magnifies it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plans import make_plan

from pipedream.comm.rank_info import RankInfo
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node
from pipedream.graph.run_config import DataFactory, Factory, OptimizerConfig, RunConfig
from pipedream.runtime.run.alike import check_alike
from pipedream.runtime.run.job import Job


def job(replicas: int, **more: Any) -> Job:
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="m:model"),
        data=DataFactory(source="m:data"),
        optimizer=OptimizerConfig(name="AdamW"),
        batch_size=1,
        **more,
    )
    graph = Graph({"a": Node("a", "Layer", 1.0)}, ())
    return Job(make_plan(graph, [["a"]], (replicas,)), config, Path(), Path())


def told(asked: Job, monkeypatch: pytest.MonkeyPatch, is_shared: bool = False) -> None:
    """Two ranks one after the other, the second with more threads."""
    store = dist.HashStore()
    for rank, threads in ((0, 1), (1, 3)):
        monkeypatch.setattr(torch, "get_num_threads", lambda own=threads: own)
        info = RankInfo(rank, 2, rank, 2, "here", 1)
        check_alike(asked, is_shared, store, info, torch.device("cpu"))


ROTATED = {"asynchronous": {"basis_rotation": True}}


def test_replicas_with_other_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one thread and two, weights were 0.023 apart after ten updates, having moved 0.067."""
    with pytest.raises(UserError, match=r"rank 1 is on .* with 3 threads, rank 0 on .* with 1 thr"):
        told(job(2, **ROTATED), monkeypatch)
    with pytest.raises(UserError, match=r"^optimizer AdamW with basis_rotation: replicas and"):
        told(job(1, **ROTATED), monkeypatch, is_shared=True)


def test_nothing_has_to_be_alike_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    told(job(1, **ROTATED), monkeypatch)
    told(job(2), monkeypatch)

"""What an epoch leaves behind on its rank."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import small_models
import torch
from plans import cut, make_plan
from processes import free_port, run_processes
from training import chain_config

from pipedream.capture.export import capture
from pipedream.comm.rank_info import RankInfo
from pipedream.graph.run_config import OptimizerConfig
from pipedream.runtime import epochs
from pipedream.runtime.engine.engine import Engine
from pipedream.runtime.run.job import Job
from pipedream.runtime.trainer import train

SUPPORT = Path(small_models.__file__).parent


def left_alive(rank: int, workers: int, job: Job, port: int) -> tuple[int, int]:
    """How many engines there have been, and how many there are at the end of the run."""
    engines: list[weakref.ref[Engine]] = []

    class Seen(Engine):
        __hash__ = object.__hash__

        def run(self, *args: object) -> None:
            engines.append(weakref.ref(self))
            super().run(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epochs, "Engine", Seen)
        gc.disable()
        train(job, RankInfo(rank, workers, rank, workers, "127.0.0.1", port))
    return len(engines), sum(engine() is not None for engine in engines)


@pytest.mark.slow
def test_an_epoch_takes_its_engine_with_it(tmp_path: Path) -> None:
    """Each knew the other: gradient buckets and data of every epoch stayed until a collection."""
    graph = capture(small_models.Chain(), (torch.randn(4, 6),)).graph
    config = chain_config(OptimizerConfig(name="SGD", args={"lr": 0.1}))
    plan = make_plan(graph, cut(graph, 1), (1,))
    job = Job(plan, config, SUPPORT, tmp_path, epochs=3, evaluate=False)
    assert run_processes(left_alive, 1, job, free_port()) == [(3, 0)]

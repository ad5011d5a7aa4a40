"""The end of a run: the model tried on one worker, and exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_models
import torch
from plans import cut, make_plan
from processes import free_port, run_processes
from safetensors.torch import load_file
from training import weights

from pipedream.capture.export import capture
from pipedream.capture.sources.load import load_config_model
from pipedream.comm.rank_info import RankInfo
from pipedream.graph.run_config import DataFactory, Factory, RunConfig
from pipedream.runtime.run.job import Job
from pipedream.runtime.trainer import train

SUPPORT = Path(small_models.__file__).parent


def _train(rank: int, workers: int, job: Job, port: int) -> None:
    train(job, RankInfo(rank, workers, rank, workers, "127.0.0.1", port))
    (job.run / f"rank {rank} has left").touch()


@pytest.mark.slow
def test_rank_0_is_waited_for_by_nobody_and_exports_what_was_not_trained_too(
    tmp_path: Path,
) -> None:
    """Trying the model took longer than --timeout: the others gave up, and with them the run.
    A layer without a stage was exported as random as that moment's, not the run's.
    """
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="small_models:Idle"),
        data=DataFactory(
            source="small_models:waiting", args={"path": str(tmp_path / "rank 1 has left")}
        ),
        batch_size=4,
        seed=3,
    )
    graph = capture(small_models.Idle(), (torch.randn(4, 6),)).graph
    target = tmp_path / "model.safetensors"
    job = Job(make_plan(graph, cut(graph, 2), (1, 1)), config, SUPPORT, tmp_path, export=target)
    run_processes(_train, 2, job, free_port())

    exported, trained = load_file(target), weights(job)
    fresh = load_config_model(config, SUPPORT).state_dict()
    assert exported.keys() == fresh.keys()
    for name, tensor in exported.items():
        expected = trained[name] if name in trained else fresh[name]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
    assert "idle.linear.weight" not in trained
    assert target.stat().st_mode == (tmp_path / "metrics.jsonl").stat().st_mode

"""Checkpoints of runs in which replicas divide the updates: whole, and gone on from by any run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from training import losses, run_jobs, weights

from pipedream.graph.run_config import OptimizerConfig
from pipedream.runtime.checkpoint.files import latest, load_optimizer
from pipedream.runtime.optim.optimizers import state_tensors
from pipedream.runtime.rank_context import RankContext
from pipedream.runtime.run.job import Job
from tests.runtime.zero.test_runs import ADAM, SGD, job_of, whole

NADAM = OptimizerConfig(name="NAdam", args={"lr": 0.02})
"""It also keeps a number for each parameter that is no count of steps."""


def state(job: Job) -> dict[str, Tensor]:
    path = latest(job.checkpoints)
    assert path is not None
    return load_optimizer(path, list(weights(job)))


def goes_on(job: Job, folder: Path, **changes: object) -> Job:
    """The rest of the run after its first epoch, in another folder."""
    run = folder / "again"
    shutil.copytree(job.checkpoints, run / "checkpoints", symlinks=True)
    shutil.rmtree(run / "checkpoints" / "epoch-0002")
    lines = (job.run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[: len(lines) // 2]))
    return replace(job, run=run, resume=True, **changes)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(each, marks=pytest.mark.thorough) for each in (ADAM, SGD)] + [NADAM],
    ids=lambda each: each.name,
)
def test_a_run_goes_on_bit_for_bit_and_under_other_plans(
    optimizer: OptimizerConfig, tmp_path: Path
) -> None:
    """The state is saved whole: as that of a run without, and one without goes on from it."""
    job = job_of(tmp_path / "zero", (2, 3), "flush", optimizer)
    plain = whole(job)
    run_jobs([job, plain])
    expected = state(plain)
    assert expected.keys() == state(job).keys()
    for name, tensor in state(job).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-12, msg=name)
    other = job_of(tmp_path / "other", (3,), "flush", optimizer)
    again = [
        goes_on(job, tmp_path / "same"),
        goes_on(job, tmp_path / "another", plan=other.plan),
        goes_on(job, tmp_path / "without", config=plain.config),
        goes_on(plain, tmp_path / "from without", config=job.config),
        goes_on(job, tmp_path / "one device", plan=job_of(tmp_path / "one", (1, 1)).plan),
    ]
    run_jobs(again)
    assert losses(again[0]) == losses(job)
    for name, tensor in {**weights(job), **state(job)}.items():
        assert torch.equal({**weights(again[0]), **state(again[0])}[name], tensor), name
    for each in again:
        assert losses(each) == pytest.approx(losses(plain), rel=1e-12, abs=1e-12)
        for name, tensor in {**weights(plain), **expected}.items():
            found = {**weights(each), **state(each)}[name]
            torch.testing.assert_close(found, tensor, rtol=1e-12, atol=1e-12, msg=name)


def note_bytes() -> None:
    """Has each rank write, where it saves, the bytes that its optimizers keep."""
    save = RankContext.save

    def noting(self: RankContext, *args: object) -> None:
        tensors = {
            f"{stage.stage} {key}": tensor
            for stage in self.local.stages
            for key, tensor in state_tensors(stage.optimizer, stage.updated).items()
        }
        sizes = {key: tensor.nbytes for key, tensor in tensors.items() if tensor.dim()}
        path = self.local.job.run / f"bytes-{self.local.rank_info.rank}.json"
        path.write_text(json.dumps(sum(sizes.values())))
        save(self, *args)  # type: ignore[arg-type]

    patch.object(RankContext, "save", noting).start()


def noted(job: Job, ranks: Sequence[int]) -> list[int]:
    return [int((job.run / f"bytes-{rank}.json").read_text()) for rank in ranks]


@pytest.mark.slow
def test_each_replica_keeps_its_part_of_the_state(tmp_path: Path) -> None:
    """Adam's two tensors of a 6 x 6 weight and 6 biases, in float64: 12 and 2 elements of them for
    each of three; the other stage has one replica and two layers.
    """
    job = job_of(tmp_path / "zero", (3, 1))
    planned = job.plan.model_copy(
        update={
            "stages": tuple(s.model_copy(update={"zero": s.stage == 0}) for s in job.plan.stages)
        }
    )
    config = job.config.model_copy(update={"zero": None})
    by_plan = replace(job, run=tmp_path / "by plan", plan=planned, config=config)
    run_jobs([job, whole(job), by_plan], prepare=note_bytes)
    assert noted(whole(job), range(4)) == [2 * 8 * 42] * 3 + [2 * 8 * 84]
    for each in (job, by_plan):
        assert noted(each, range(4)) == [2 * 8 * 14] * 3 + [2 * 8 * 84]

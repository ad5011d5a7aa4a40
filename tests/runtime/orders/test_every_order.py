"""Each order of passes in real processes learns what the plain model does, in float64.

All orders of a test run one after the other in the same processes.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from order_runs import ADAM, MOMENTUM, assert_as_plain, on_ranks, plain, plan_of, prepare
from order_runs import unequal_times as unequal
from schedules import ORDERS
from training import run_jobs

from pipedream.graph.run_config import RunConfig
from pipedream.runtime.checkpoint.files import load_all
from pipedream.runtime.run.job import Job
from pipedream.schedule.orders.named import ROUND_ORDERS


def test_these_are_all() -> None:
    assert ORDERS.keys() == ROUND_ORDERS.keys()


def train_all(
    folder: Path,
    model: str,
    places: int,
    replicas: int = 1,
    recomputing: bool = False,
    **changes: object,
) -> RunConfig:
    """A run in a folder by the name of each order; `recomputing`: all stages but the last."""
    config = prepare(folder, model, "zb-h1", [[0], [1]], **changes)
    jobs = []
    for order, (rank_map, each) in ORDERS.items():
        stages = places * each
        recompute: Collection[int] = range(stages - 1) if recomputing else ()
        times = unequal(stages, 3.0 * each + 1) if order == "auto" else None
        ranks = on_ranks(rank_map(places, each), replicas)
        plan = plan_of(model, order, ranks, config.microbatches, recompute, times)
        job = Job(plan, config, folder, folder / order, schedule="flush", epochs=config.epochs)
        job.check()
        jobs.append(job)
    run_jobs(jobs)
    return config


def assert_all_as_plain(folder: Path, config: RunConfig) -> None:
    reference = plain(config)
    for order in ORDERS:
        assert_as_plain(folder, config, order, reference)


@pytest.mark.thorough
def test_tied_weights_clipped_and_a_smaller_last_round(tmp_path: Path) -> None:
    """Rounds of 5, 5 and 2, evaluation after both epochs. In a V both holders of the weight are on
    the first rank; elsewhere they are on two.
    """
    changes = {"optimizer": MOMENTUM, "clip_norm": 0.05, "microbatches": 5, "epochs": 2}
    config = train_all(tmp_path, "Tied", 2, **changes)
    assert_all_as_plain(tmp_path, config)


@pytest.mark.thorough
def test_fewer_microbatches_than_ranks_and_recomputation(tmp_path: Path) -> None:
    """Three ranks, with links that skip stages."""
    changes = {"optimizer": ADAM, "microbatches": 2, "epochs": 1}
    config = train_all(tmp_path, "Skips", 3, recomputing=True, **changes)
    assert_all_as_plain(tmp_path, config)


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["Chain", "Tied"])
def test_replicas_of_the_whole_pipeline(tmp_path: Path, model: str) -> None:
    """The last of the rounds of 5, 5 and 1 has no minibatch for the second replica."""
    data = {"source": "small_models:classes", "args": {"examples": 60}}
    changes = {"optimizer": MOMENTUM, "clip_norm": 0.05, "microbatches": 5, "epochs": 1}
    config = train_all(tmp_path, model, 2, replicas=2, data=data, **changes)
    assert_all_as_plain(tmp_path, config)


@pytest.mark.thorough
def test_dropout_and_batch_norm(tmp_path: Path) -> None:
    """They draw what the model does on one rank, by itself, also in a smaller last minibatch."""
    data = {"source": "small_models:classes", "args": {"examples": 68}}
    changes = {"optimizer": ADAM, "evaluate_every": None, "drop_last": False, "epochs": 1}
    config = train_all(tmp_path, "Noisy", 2, recomputing=True, data=data, **changes)
    plan = plan_of("Noisy", None, [[0]], config.microbatches)
    alone = Job(plan, config, tmp_path, tmp_path / "alone", schedule="flush", evaluate=False)
    run_jobs([alone])
    expected = load_all(tmp_path / "alone/checkpoints/latest")
    for order in ORDERS:
        learnt = load_all(tmp_path / order / "checkpoints/latest")
        assert learnt.keys() == expected.keys()
        torch.testing.assert_close(learnt, expected, rtol=1e-12, atol=1e-12)

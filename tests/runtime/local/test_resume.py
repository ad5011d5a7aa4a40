"""Checkpoints that do not go with what is asked now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_models
import torch
from plans import cut, make_plan
from training import chain_config, run_jobs

from pipedream.capture.export import capture
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import OptimizerConfig
from pipedream.runtime.checkpoint.files import State
from pipedream.runtime.local.resume import _check_position
from pipedream.runtime.run.job import Job

SUPPORT = Path(small_models.__file__).parent
CONFIG = chain_config(OptimizerConfig(name="AdamW", args={"lr": 0.01}))


@pytest.mark.slow
def test_other_arguments_of_the_optimizer(tmp_path: Path) -> None:
    """What AdamW remembers lacks what amsgrad wants: the first update ended in a traceback."""
    graph = capture(small_models.Chain(), (torch.randn(4, 6),)).graph
    job = Job(make_plan(graph, cut(graph, 2), (1, 1)), CONFIG, SUPPORT, tmp_path)
    other = OptimizerConfig(name="AdamW", args={"lr": 0.01, "amsgrad": True})
    config = CONFIG.model_copy(update={"optimizer": other})
    with pytest.raises(AssertionError, match=r"UserError: .*cannot make a step: KeyError"):
        run_jobs([job, replace(job, config=config, epochs=2, resume=True)])


@pytest.mark.parametrize(
    ("minibatch", "before", "minibatches", "problem"),
    [
        (8, 2, 16, r"minibatches of 2, and the config says batch_size: 4: go on with 2"),
        (8, 4, 8, r"has 8 minibatches of an epoch behind it, and the data give 8"),
        (8, 4, 9, None),
        (0, 2, 16, None),
    ],
)
def test_inside_an_epoch_minibatches_are_counted(
    minibatch: int, before: int, minibatches: int, problem: str | None
) -> None:
    rank: Any = SimpleNamespace(
        job=SimpleNamespace(config=CONFIG), examples=SimpleNamespace(minibatches=minibatches)
    )
    saved = State(epoch=1, minibatch=minibatch, details={"batch_size": before})
    if problem is None:
        _check_position(rank, Path("saved"), saved)
    else:
        with pytest.raises(UserError, match=problem):
            _check_position(rank, Path("saved"), saved)

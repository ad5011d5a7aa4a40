"""Sums over replicas of gradients that never come."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_models
import torch
from plans import cut, make_plan
from training import run_jobs, weights

from pipedream.capture.export import capture
from pipedream.capture.sources.load import load_config_model
from pipedream.graph.run_config import DataFactory, Factory, OptimizerConfig, RunConfig
from pipedream.runtime.run.job import Job

SUPPORT = Path(small_models.__file__).parent


@pytest.mark.slow
def test_a_parameter_without_a_gradient_is_left_alone(tmp_path: Path) -> None:
    """With replicas its gradient was zero, so that weight decay moved it; the plain loop does not.

    Nine minibatches for two replicas: the last round is one replica's alone.
    """
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="small_models:Aside"),
        data=DataFactory(source="small_models:regression", args={"examples": 36}),
        loss="mse_loss",
        optimizer=OptimizerConfig(name="AdamW", args={"lr": 0.1, "weight_decay": 0.5}),
        batch_size=4,
    )
    graph = capture(small_models.Aside(), (torch.randn(4, 6),)).graph
    job = Job(make_plan(graph, cut(graph, 1), (2,)), config, SUPPORT, tmp_path)
    run_jobs([job])
    before, after = load_config_model(config, SUPPORT).state_dict(), weights(job)
    for name, weight in after.items():
        if name.startswith("b."):
            torch.testing.assert_close(weight, before[name], rtol=0, atol=0)
        else:
            with pytest.raises(AssertionError):
                torch.testing.assert_close(weight, before[name])

"""Buffers that a model changes in its own code: what other stages read, and what is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_models
import torch
from plans import cut, make_plan
from training import losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.capture.sources.load import load_config_model
from pipedream.graph.run_config import DataFactory, Factory, OptimizerConfig, RunConfig
from pipedream.runtime.data.reader import Epoch
from pipedream.runtime.run.job import Job

SUPPORT = Path(small_models.__file__).parent


@pytest.mark.slow
def test_a_running_mean_is_what_the_plain_loop_has(tmp_path: Path) -> None:
    """The second of two writes in a row was lost; the last stage read a buffer of its own that
    nobody changed; two minibatches in flight wrote into what the first one's gradients needed.
    """
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="small_models:Averaging"),
        data=DataFactory(source="small_models:regression", args={"examples": 32}),
        loss="mse_loss",
        optimizer=OptimizerConfig(name="SGD", args={"lr": 0.1}),
        batch_size=4,
        microbatches=4,
        dtype="float64",
    )
    example = torch.randn(4, 6, dtype=torch.float64)
    graph = capture(load_config_model(config, SUPPORT), (example,)).graph
    job = Job(make_plan(graph, cut(graph, 3), (1, 1, 1)), config, SUPPORT, tmp_path, "cpu", "flush")
    run_jobs([job])

    model = load_config_model(config, SUPPORT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epoch = Epoch(small_models.regression(32)[0], config, 1, torch.device("cpu"))
    expected = []
    for minibatch in range(8):
        batch = epoch.batch(minibatch)
        loss = torch.nn.functional.mse_loss(model(*batch.inputs), batch.target)
        (loss / 4).backward()
        expected.append(loss.item())
        if minibatch % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(losses(job), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights(job), model.state_dict(), rtol=1e-12, atol=1e-12)

"""Complex parameters, buffers and inputs keep both parts, and learn what a plain loop has them
learn: on one worker, in stages, replicas and halves, under an optimizer and a norm.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import one_rank
import pytest
import small_models
import torch
from one_rank import OneRank, all_halved, none_halved, regression
from plans import cut, make_plan
from training import losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.capture.sources.load import load_config_model
from pipedream.capture.sources.minibatch import in_type
from pipedream.graph.choices import ScheduleName
from pipedream.graph.run_config import DataFactory, Factory, OptimizerConfig, RunConfig
from pipedream.runtime.data.reader import Epoch
from pipedream.runtime.run.job import Job

SUPPORT = Path(small_models.__file__).parent
CONFIG = RunConfig(
    format="pipedream-run/1",
    model=Factory(source="small_models:Filtered"),
    data=DataFactory(source="small_models:regression", args={"examples": 24}),
    loss="mse_loss",
    optimizer=OptimizerConfig(name="Adam", args={"lr": 0.05}),
    batch_size=4,
    microbatches=2,
    clip_norm=0.05,
    dtype="float64",
)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_model_of_a_dtype_keeps_imaginary_parts(dtype: str) -> None:
    """They were dropped, with nothing but a warning of torch's."""
    config = CONFIG.model_copy(update={"dtype": dtype})
    model = load_config_model(config, SUPPORT)
    torch.manual_seed(config.seed)
    made, wanted = small_models.Filtered(), getattr(torch, dtype).to_complex()
    for name, tensor in made.state_dict().items():
        own = model.state_dict()[name]
        assert own.dtype == (wanted if tensor.is_complex() else getattr(torch, dtype))
        assert torch.equal(own, in_type(tensor, getattr(torch, dtype)))


def test_data_keep_imaginary_parts() -> None:
    given = torch.polar(torch.ones(3), torch.arange(3.0))
    assert torch.equal(in_type(given, torch.float64), given.to(torch.complex128))
    assert in_type(torch.arange(3), torch.float64).dtype == torch.int64


def _plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Updates of two minibatches each, as flush makes them."""
    model = load_config_model(CONFIG, SUPPORT)
    data, _ = small_models.regression(24)
    epoch = Epoch(data, CONFIG, 1, torch.device("cpu"))
    optimizer, found = torch.optim.Adam(model.parameters(), 0.05), []
    for number in range(len(epoch)):
        batch = epoch.batch(number)
        loss = torch.nn.functional.mse_loss(model(*batch.inputs), batch.target)
        (loss / 2).backward()
        found.append(loss.item())
        if number % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return found, model.state_dict()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_runs_learn_what_a_loop_does(tmp_path: Path) -> None:
    expected = _plain()
    model = load_config_model(CONFIG, SUPPORT)
    graph = capture(model, (torch.randn(4, 6, dtype=torch.float64),)).graph
    schedule: ScheduleName = "flush"
    jobs = [
        Job(
            make_plan(graph, cut(graph, len(replicas)), replicas, schedule),
            CONFIG,
            SUPPORT,
            tmp_path / str(number),
            schedule=schedule,
        )
        for number, replicas in enumerate([(1,), (1, 1), (2,)])
    ]
    begun = replace(jobs[1], run=tmp_path / "begun", epochs=1)
    both = replace(jobs[1], run=tmp_path / "both", epochs=2)
    run_jobs([*jobs, begun, replace(begun, epochs=2, resume=True), both], 180.0)
    assert losses(begun) == losses(both)
    for job in jobs:
        assert losses(job) == pytest.approx(expected[0], abs=1e-9)
        for name, tensor in weights(job).items():
            torch.testing.assert_close(tensor, expected[1][name], rtol=0, atol=1e-9)


def test_halves_learn_what_whole_passes_do() -> None:
    def trained(halved: one_rank.Which) -> OneRank:
        torch.manual_seed(3)
        model = small_models.Filtered()._apply(lambda tensor: in_type(tensor, torch.float64))
        return OneRank(model, regression(), stages=3, halved=halved).train()

    whole, halves = trained(none_halved), trained(all_halved)
    assert halves.losses == pytest.approx(whole.losses, abs=1e-12)
    for name, tensor in whole.state.items():
        torch.testing.assert_close(halves.state[name], tensor, rtol=0, atol=1e-12)

"""What an optimizer remembers, put back where torch.optim looks for it; sparse gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_models
import torch
from plans import cut, make_plan
from torch import nn
from torch.nn import functional as F
from training import chain_config, losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.graph.run_config import DataFactory, Factory, OptimizerConfig
from pipedream.runtime.data.reader import Epoch
from pipedream.runtime.job import Job
from pipedream.runtime.optim.optimizers import make_optimizer, restore_state

SUPPORT = Path(small_models.__file__).parent


@pytest.mark.parametrize(
    ("args", "device"),
    [
        ({}, "meta"),  # fused, unless it is said otherwise
        ({"capturable": True}, "meta"),
        ({"foreach": True}, "cpu"),
        ({"fused": False}, "cpu"),
    ],
)
def test_the_count_of_steps_is_where_the_step_is_made(args: dict[str, bool], device: str) -> None:
    """A resumed run on a GPU stopped at its first step: the fused kernel got a count on the CPU.
    Here the meta device stands for it.
    """
    parameters = {"w": nn.Parameter(torch.empty(2, 3, device="meta"))}
    optimizer = make_optimizer(OptimizerConfig(name="Adam", args=args), parameters)
    known = {"w/step": torch.tensor(7.0), "w/exp_avg": torch.ones(2, 3)}
    restore_state(optimizer, parameters, known)
    found = {key: tensor.device.type for key, tensor in optimizer.state[parameters["w"]].items()}
    assert found == {"step": device, "exp_avg": "meta"}


@pytest.mark.slow
def test_an_embedding_with_sparse_gradients_learns_as_in_the_plain_loop(tmp_path: Path) -> None:
    """Where the plain loop has sparse gradients, the stage has dense ones of the same values."""
    optimizer = OptimizerConfig(name="Adagrad", args={"lr": 0.1})
    config = chain_config(optimizer).model_copy(
        update={
            "model": Factory(source="small_models:Words"),
            "data": DataFactory(source="small_models:tokens", args={"examples": 32}),
            "dtype": "float64",
        }
    )
    data, _ = small_models.tokens(examples=32)
    graph = capture(small_models.Words(), (data.tensors[0][:4],)).graph
    plan = make_plan(graph, cut(graph, 2), (1, 1), "flush")
    job = Job(plan, config, SUPPORT, tmp_path, schedule="flush")
    run_jobs([job])
    torch.manual_seed(config.seed)
    model = small_models.Words().double()
    plain, sparse, found = torch.optim.Adagrad(model.parameters(), lr=0.1), False, []
    epoch = Epoch(data, config, 1, torch.device("cpu"))
    batches = [epoch.batch(index) for index in range(len(epoch))]
    for begin in range(0, len(batches), config.microbatches):
        part = batches[begin : begin + config.microbatches]
        each = [F.mse_loss(model(batch.inputs[0]), batch.target) for batch in part]
        found += [loss.item() for loss in each]
        torch.stack(each).mean().backward()
        gradient = model.a.weight.grad
        sparse |= gradient is not None and gradient.is_sparse
        plain.step()
        plain.zero_grad()
    assert sparse
    assert losses(job) == pytest.approx(found, rel=1e-12)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights(job)[name], tensor, rtol=1e-12, atol=1e-12)

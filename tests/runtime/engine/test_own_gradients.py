"""Models that bring their own loss or their own backward pass, as pipelines of two workers.

One flush step with learning rate 1, so that the change of a weight is its gradient.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plans
import pytest
import torch
from training import run_jobs, weights

from pipedream.capture.errors.user_code import load_function
from pipedream.capture.export import capture
from pipedream.capture.sources.load import load_config
from pipedream.capture.sources.transformers import load_transformers
from pipedream.graph.run_config import DataFactory, Factory, OptimizerConfig, RunConfig
from pipedream.runtime.run.job import Job

USERS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()
    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.second(Straight.apply(3 * self.first(x)).relu_())

def tokens():
    tokens = torch.arange(36).view(4, 9) % 20
    return TensorDataset(tokens, tokens), None

def numbers():
    x = torch.linspace(-1, 1, 16).view(4, 4)
    return TensorDataset(x, x.flip(0)), None
"""
GPT = {
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "vocab_size": 20,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def config(model: str, args: dict[str, Any], data: str, loss: str) -> RunConfig:
    return RunConfig(
        format="pipedream-run/1",
        model=Factory(source=model, args=args),
        data=DataFactory(source=data),
        loss=loss,
        optimizer=OptimizerConfig(name="SGD", args={"lr": 1.0}),
        batch_size=2,
        microbatches=2,
        seed=3,
    )


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("loss", ["inside", "outside"])
def test_gradients_are_those_of_the_plain_model(loss: str, tmp_path: Path) -> None:
    (tmp_path / f"users_{loss}.py").write_text(USERS)
    if loss == "inside":
        run = config("transformers:gpt2", GPT, f"users_{loss}:tokens", "output")
    else:
        run = config(f"users_{loss}:Model", {}, f"users_{loss}:numbers", "mse_loss")
    loaded = load_config(run, tmp_path)
    graph = capture(loaded.model, loaded.args).graph
    plan = plans.make_plan(graph, plans.cut(graph, 2), (1, 1), schedule="flush")
    job = Job(plan, run, tmp_path, tmp_path / "run", schedule="flush", evaluate=False)
    run_jobs([job])

    torch.manual_seed(run.seed)
    if loss == "inside":
        model = load_transformers("gpt2", GPT).train()
        (data, _) = load_function(run.data.source, tmp_path)()
        model(input_ids=data.tensors[0], labels=data.tensors[1]).loss.backward()
    else:
        model = load_function(run.model.source, tmp_path)()
        (data, _) = load_function(run.data.source, tmp_path)()
        torch.nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1]).backward()
    after = weights(job)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        change = parameter.detach() - after[name]
        torch.testing.assert_close(change, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)

"""Models that people train, as pipelines of three workers: one flush step has the plain gradients.

Three examples in minibatches of two and one; batch norm needs four where it sees a single pixel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from torch import nn
from training import run_jobs, weights

from pipedream.capture.export import capture
from pipedream.capture.sources.load import load_config_model
from pipedream.graph.cluster import Cluster
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan
from pipedream.graph.run_config import DataFactory, Factory, OptimizerConfig, RunConfig
from pipedream.optimizer.cost.models import COST_MODELS
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request
from pipedream.runtime.data.reader import Epoch
from pipedream.runtime.run.job import Job

SUPPORT = Path(small_models.__file__).parent


def images(size: int, examples: int = 3) -> DataFactory:
    return DataFactory(source="small_models:images", args={"size": size, "examples": examples})


TOKENS = DataFactory(source="small_models:tokens", args={"examples": 3})
TRANSFORMER = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}

# Dropout is off: its random numbers differ between one process and several.
MODELS: dict[str, tuple[DataFactory, dict[str, Any]]] = {
    "image_models:SmallVGG": (images(32), {}),
    "torchvision:resnet18": (images(64), {"num_classes": 10}),
    "image_models:small_densenet": (images(32, examples=4), {}),
    "torchvision:googlenet": (
        images(64, examples=4),
        {"num_classes": 10, "dropout": 0.0, "dropout_aux": 0.0, "init_weights": False},
    ),
    "image_models:small_vit": (images(32), {}),
    "transformers:gpt2": (
        TOKENS,
        {
            **TRANSFORMER,
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 2,
            "n_positions": 32,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "transformers:bert": (
        TOKENS,
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    "transformers:llama": (
        TOKENS,
        {
            **TRANSFORMER,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        },
    ),
}


def config_for(name: str) -> RunConfig:
    """One update with learning rate 1, so that the change of a weight is its gradient."""
    data, args = MODELS[name]
    return RunConfig(
        format="pipedream-run/1",
        model=Factory(source=name, args=args),
        data=data,
        loss="small_models:mean_square",
        optimizer=OptimizerConfig(name="SGD", args={"lr": 1.0}),
        batch_size=2,
        microbatches=2,
        seed=5,
    )


def plan_for(graph: Graph) -> Plan:
    """The planner's plan for three workers, were time in proportion to bytes, on a network slow
    enough for a pipeline.
    """
    timed = graph.with_nodes(
        replace(node, forward_seconds=cost, backward_seconds=2 * cost)
        for node in graph.nodes.values()
        if (cost := 1e-9 * (node.output_bytes + node.parameter_bytes))
    )
    cluster = Cluster(machines=(3,), bandwidth=(2e8,))
    return optimize(Request(timed, cluster, COST_MODELS["paper"](None), "flush"), 300).plan


def plain_step(
    model: nn.Module, epoch: Epoch
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """The plain model's weights, and their gradients over the minibatches of the epoch."""
    for number in range(len(epoch)):
        output = model(*epoch.batch(number).inputs)
        loss = small_models.mean_square(output, torch.zeros(()))
        (loss / len(epoch)).backward()
    named = dict(model.named_parameters())
    gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
    return {name: named[name].detach() for name in gradients}, gradients


@pytest.mark.one_in(12)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_plain_model(name: str, tmp_path: Path) -> None:
    config = config_for(name)
    torch.manual_seed(config.seed)
    model = load_config_model(config, SUPPORT)
    data, _ = getattr(small_models, config.data.source.partition(":")[2])(**config.data.args)
    epoch = Epoch(data, config, 1, torch.device("cpu"))
    plan = plan_for(capture(model, epoch.batch(0).inputs).graph)
    assert plan.workers == 3
    assert len(plan.stages) > 1
    job = Job(plan, config, SUPPORT, tmp_path, schedule="flush", evaluate=False)
    run_jobs([job], seconds=280.0)

    before, gradients = plain_step(model, epoch)
    after = weights(job)
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    assert largest > 0
    for name, gradient in gradients.items():
        difference = (before[name] - after[name]) - gradient
        assert difference.abs().max().item() <= 1e-5 * max(largest, 1.0), name

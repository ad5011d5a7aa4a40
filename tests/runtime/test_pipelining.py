"""Exported splits, run by torch.distributed.pipelining."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from plans import cut, make_plan
from processes import free_port, run_processes
from small_models import Chain, Normed, Skips, Towers
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, pipeline

from pipedream.capture.sources.load import Loaded
from pipedream.graph.command import write_files
from pipedream.graph.errors import UserError
from pipedream.graph.profile import read_profile_of, write_profile
from pipedream.optimizer.export.frameworks import export
from pipedream.profiler.assembly import Settings
from pipedream.profiler.measure import measure
from pipedream.profiler.timing.stopping_rule import StoppingRule
from pipedream.runtime.pipelining import split_policy

MICROBATCHES = 4


class Transformer(nn.Module):
    """Tokens to logits through two blocks of causal attention, each with its skips."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)
        )
        self.mlp = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + attention(x, x, x, attn_mask=mask, need_weights=False)[0]
            x = x + torch.tanh(mlp(x))
        return self.head(x)  # type: ignore[no-any-return]


def profiled(model: nn.Module, example: Tensor, folder: Path, pieces=None, replicas=(1, 1)) -> Path:
    """export-torch.json for these stages (default: halves of the nodes in order)."""
    settings = Settings("a model", {}, len(example), torch.device("cpu"), StoppingRule(1, 1), 1)
    measured = measure(Loaded(copy.deepcopy(model), (example,)), settings)
    graph, profile = measured.graph, measured.profile
    write_profile(profile, folder / "profile.json")
    plan = make_plan(graph, pieces(graph) if pieces else cut(graph, 2), replicas)
    made = export("torch", plan, graph, read_profile_of(folder / "profile.json", graph))
    write_files(folder, made.files("export-torch"))
    return folder / "export-torch.json"


def gradients(model: nn.Module) -> dict[str, Any]:
    """By name, as arrays: a tensor cannot be read once the process that sent it has ended."""
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def run_stage(rank: int, processes: int, model, x, target, path, port: int) -> dict[str, Any]:
    """The gradients of this rank's stage, from torch's own 1F1B."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    try:
        part = x.chunk(MICROBATCHES)[0]
        pipe = pipeline(model.train(), (part,), split_policy=split_policy(path))
        assert pipe.num_stages == processes
        stage = pipe.build_stage(rank, torch.device("cpu"))
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=square)
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target)
        return gradients(stage.submod)
    finally:
        dist.destroy_process_group()


@pytest.mark.one_in(5)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [Skips, Chain, Towers, Transformer])
def test_two_processes_give_the_gradients_of_the_plain_model(kind, tmp_path):
    torch.manual_seed(3)
    model = kind()
    x = torch.randint(0, 16, (8, 5)) if kind is Transformer else torch.randn(8, 6)
    target = torch.randn_like(model(x))
    pieces = _right_tower_first if kind is Towers else None
    path = profiled(model, x.chunk(MICROBATCHES)[0], tmp_path, pieces)
    stages = run_processes(run_stage, 2, model, x, target, path, free_port(), seconds=60)
    losses = [
        square(model(part), wanted)
        for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
    ]
    torch.stack(losses).mean().backward()
    assert all(stages), "each stage has some parameters"
    assert stages[0].keys().isdisjoint(stages[1])
    plain, split = gradients(model), stages[0] | stages[1]
    assert split.keys() == plain.keys()
    for name in plain:
        np.testing.assert_allclose(split[name], plain[name], rtol=1e-5, atol=1e-6)


def _right_tower_first(graph) -> list[list[str]]:
    """What only the right tower computes in the first stage, though it runs after the left one."""
    layers = [name for name in graph.order if graph.nodes[name].description.startswith("Linear")]
    right, inside = layers[2:4], set()
    for name in graph.order:
        sources = graph.predecessors[name]
        if name in right or (sources and set(sources) <= inside and len(sources) == 1):
            inside.add(name)
    inside -= {name for name in graph.order if graph.nodes[name].description == "Neg"}
    first = {name for name in graph.order if graph.nodes[name].is_input} | inside
    assert 4 <= len(first) < len(graph.order) / 2 + 1
    return [[n for n in graph.order if n in first], [n for n in graph.order if n not in first]]


@pytest.mark.thorough
def test_batch_norm_keeps_its_statistics_with_it(tmp_path):
    model, x = Normed(), torch.randn(8, 6)
    path = profiled(model, x, tmp_path)
    pipe = pipeline(model.train(), (x,), split_policy=split_policy(path))
    names = {name for stage in pipe.split_gm.children() for name, _ in stage.named_buffers()}
    assert names == {name for name, _ in model.named_buffers()}
    assert pipe.num_stages == 2


@pytest.mark.thorough
def test_another_model_is_refused(tmp_path):
    path = profiled(Skips(), torch.randn(4, 6), tmp_path)
    with pytest.raises(UserError, match=r"export-torch\.json: operator \w+ is not in the model"):
        pipeline(Chain(), (torch.randn(4, 6),), split_policy=split_policy(path))


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "split.json"
    path.write_text('{"format": "pipedream-plan/1", "model": "m", "torch": "2", "stages": [["a"]]}')
    with pytest.raises(UserError, match=r"split\.json"):
        split_policy(path)

"""Orders of passes that torch.distributed.pipelining runs: the gradients of the plain model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from plans import cut, make_plan
from processes import free_port, run_processes
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, pipeline
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from pipedream.capture.export import capture
from pipedream.capture.sources.load import Loaded
from pipedream.graph.command import write_files
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan
from pipedream.graph.profile import read_profile_of, write_profile
from pipedream.optimizer.export.frameworks import export
from pipedream.optimizer.export.torch_order import TorchOrder, torch_order
from pipedream.profiler.assembly import Settings
from pipedream.profiler.measure import measure
from pipedream.profiler.timing.stopping_rule import StoppingRule
from pipedream.runtime.pipelining import split_policy
from pipedream.schedule.orders.literature import loop, vee

CPU = torch.device("cpu")
LAYERS, WIDTH, MICROBATCHES = 4, 6, 5
RANK_MAPS = {"zb-h1": loop(2, 1), "interleaved": loop(2, 2), "zb-v": vee(2, 2)}

Gradients = dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"]


def made_model() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(5)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).double()


def minibatch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(7)
    x, y = torch.randn(2, 3 * MICROBATCHES, WIDTH, generator=draw, dtype=torch.float64)
    return x, y


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def plan_of(order: str, rank_map: Sequence[int], graph: Graph | None = None) -> Plan:
    stages = len(rank_map)
    graph = graph or capture(made_model(), minibatch()[:1]).graph
    data = make_plan(graph, cut(graph, stages), [1] * stages, "flush").model_dump()
    for stage, place in zip(data["stages"], rank_map, strict=True):
        stage["ranks"] = (place,)
    data["predicted"]["microbatches"] = MICROBATCHES
    return Plan.model_validate(data | {"order": order})


def gradients(model: nn.Module) -> Gradients:
    """By name, as arrays: a tensor cannot be read once the process that sent it has ended."""
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def run_rank(
    rank: int, ranks: int, cases: Sequence[tuple[Path, TorchOrder]], port: int
) -> list[Gradients]:
    """The gradients of this rank's stages in each case, after a step of torch's runtime."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        return [step(rank, path, order) for path, order in cases]
    finally:
        dist.destroy_process_group()


def step(rank: int, path: Path, order: TorchOrder) -> Gradients:
    model, count = made_model(), len(order.stage_ranks)
    each = LAYERS // count
    stages = [
        PipelineStage(model[stage * each : (stage + 1) * each], stage, count, CPU)
        for stage in own_stages(rank, order.stage_ranks)
    ]
    run(stages, path, order.microbatches)
    return gradients(model)


def own_stages(rank: int, stage_ranks: Sequence[int]) -> list[int]:
    return [stage for stage, at in enumerate(stage_ranks) if at == rank]


def run(stages: Sequence[Any], path: Path, microbatches: int) -> None:
    runtime = _PipelineScheduleRuntime(stages, microbatches, loss_fn=square)
    runtime._load_csv(str(path), format="compute_only")
    x, y = minibatch()
    inputs = (x,) if any(stage.is_first for stage in stages) else ()
    target = y if any(stage.is_last for stage in stages) else None
    runtime.step(*inputs, target=target)


def run_export(rank: int, ranks: int, folder: Path, port: int) -> Gradients:
    """The gradients of this rank's stages, as docs/how-to/export.md runs the files of an export."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        order = json.loads((folder / "export-torch.json").read_text())["order"]
        part = minibatch()[0].chunk(order["microbatches"])[0]
        policy = split_policy(folder / "export-torch.json")
        pipe = pipeline(made_model(), (part,), split_policy=policy)
        own = own_stages(rank, order["stage_ranks"])
        stages = [PipelineStage(pipe.get_stage_module(at), at, pipe.num_stages, CPU) for at in own]
        run(stages, folder / order["file"], order["microbatches"])
        return {name: g for stage in stages for name, g in gradients(stage.submod).items()}
    finally:
        dist.destroy_process_group()


def assert_as_plain(*ranks: Gradients) -> None:
    model, (x, y) = made_model(), minibatch()
    square(model(x), y).backward()
    expected = gradients(model)
    assert all(ranks), "each rank has some parameters"
    assert sum(map(len, ranks)) == len(expected)
    found = {name: gradient for own in ranks for name, gradient in own.items()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.slow
def test_torch_runs_the_orders_to_the_gradients_of_the_plain_model(tmp_path: Path) -> None:
    cases = []
    for name, rank_map in RANK_MAPS.items():
        order = torch_order(plan_of(name, rank_map))
        (tmp_path / f"{name}.csv").write_text(order.csv)
        cases.append((tmp_path / f"{name}.csv", order))
    for both in zip(*run_processes(run_rank, 2, cases, free_port(), seconds=60), strict=True):
        assert_as_plain(*both)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_files_of_an_export_are_all_that_torch_needs(tmp_path: Path) -> None:
    part = minibatch()[0].chunk(MICROBATCHES)[0]
    settings = Settings("a model", {}, len(part), CPU, StoppingRule(1, 1), 1)
    measured = measure(Loaded(made_model(), (part,)), settings)
    graph, profile = measured.graph, measured.profile
    write_profile(profile, tmp_path / "profile.json")
    made = export(
        "torch",
        plan_of("zb-v", RANK_MAPS["zb-v"], graph),
        graph,
        read_profile_of(tmp_path / "profile.json", graph),
    )
    write_files(tmp_path, made.files("export-torch"))
    assert_as_plain(*run_processes(run_export, 2, tmp_path, free_port(), seconds=60))

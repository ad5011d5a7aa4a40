"""Orders of passes that torch.distributed.pipelining runs: the gradients of the plain model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from plans import cut, make_plan
from processes import free_port, run_processes
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from pipedream.capture.export import capture
from pipedream.graph.plan import Plan
from pipedream.optimizer.export.torch_order import TorchOrder, torch_order
from pipedream.schedule.rank_maps import loop, vee

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


def plan_of(order: str, rank_map: Sequence[int]) -> Plan:
    stages = len(rank_map)
    graph = capture(made_model(), minibatch()[:1]).graph
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
        PipelineStage(model[stage * each : (stage + 1) * each], stage, count, torch.device("cpu"))
        for stage, at in enumerate(order.stage_ranks)
        if at == rank
    ]
    runtime = _PipelineScheduleRuntime(stages, order.microbatches, loss_fn=square)
    runtime._load_csv(str(path), format="compute_only")
    x, y = minibatch()
    inputs = (x,) if any(stage.is_first for stage in stages) else ()
    target = y if any(stage.is_last for stage in stages) else None
    runtime.step(*inputs, target=target)
    return gradients(model)


@pytest.mark.slow
def test_torch_runs_the_orders_to_the_gradients_of_the_plain_model(tmp_path: Path) -> None:
    cases = []
    for name, rank_map in RANK_MAPS.items():
        order = torch_order(plan_of(name, rank_map))
        (tmp_path / f"{name}.csv").write_text(order.csv)
        cases.append((tmp_path / f"{name}.csv", order))
    model, (x, y) = made_model(), minibatch()
    square(model(x), y).backward()
    expected = gradients(model)
    first, second = run_processes(run_rank, 2, cases, free_port(), seconds=60)
    for one, other in zip(first, second, strict=True):
        assert one
        assert other
        assert one.keys().isdisjoint(other)
        assert (one | other).keys() == expected.keys()
        for name, gradient in (one | other).items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-12, atol=1e-12)

"""Exported placements, as DTensors of torch's own: each rank has what pd-train would have there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from commands import typed
from numpy.typing import NDArray
from processes import free_port, run_processes
from sharded_runs import PROFILE, captured, write_config
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan, read_plan
from pipedream.runtime.stages.dtensor_placements import stage_placements
from pipedream.runtime.stages.planned_passes import PlannedPasses
from pipedream.runtime.stages.sharded_stage import ShardedStage

Array = NDArray[np.float64]
Held = dict[str, tuple[Array, Array]]

OPTIONS = ("--bandwidth", "1TB", "--schedule", "flush", "--microbatches", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiled")
    write_config(folder, "Fused", microbatches=2, evaluate_every=None)
    done = typed(folder, PROFILE)
    assert done.code == 0, done.error
    return folder


def exported(folder: Path, framework: str, *options: str) -> tuple[Plan, Path, str]:
    """The plan, the file of placements, and what pd-optimize said."""
    words = ["pd-optimize", "graph.txt", *OPTIONS, "-o", "plan", "--export", framework, *options]
    done = typed(folder, words)
    assert done.code == 0, done.error
    plan = folder / "plan"
    return read_plan(plan / "plan.json"), plan / f"export-{framework}-placements.json", done.out


def distributed(rank: int, processes: int, path: Path, stage: int, port: int) -> Held:
    """Each parameter of the stage as this rank's part of a DTensor, and as that whole again."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    placed = stage_placements(path)[stage]
    mesh = init_device_mesh("cpu", placed.mesh)
    held = {}
    for name, tensor in tensors().items():
        if name in placed.parameters:
            made = distribute_tensor(tensor, mesh, placed.parameters[name])
            whole = tensor if cannot_gather(placed.parameters[name]) else made.full_tensor()
            held[name] = made.to_local().numpy(), whole.numpy()
    dist.destroy_process_group()
    return held


def cannot_gather(placements: tuple[Placement, ...]) -> bool:
    """DTensor takes a strided shard for the outer one of two that divide one dimension."""
    dims = [each.dim for each in placements if isinstance(each, (Shard, _StridedShard))]
    strided = any(isinstance(each, _StridedShard) for each in placements)
    return strided and len(set(dims)) < len(dims)


def tensors() -> dict[str, Tensor]:
    """The model's parameters, each element its own number."""
    return {
        name: torch.arange(parameter.numel(), dtype=torch.float64).reshape(parameter.shape)
        for name, parameter in captured("Fused").module.named_parameters()
    }


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("options", "stage"),
    [
        (("--machines", "2", "--mesh", "2"), 0),
        (("--machines", "4", "--mesh", "2", "--straight"), 1),
        (("--machines", "4", "--mesh", "2,2"), 0),
    ],
)
def test_dtensors_are_the_parts_that_ranks_have(
    folder: Path, options: tuple[str, ...], stage: int
) -> None:
    plan, path, said = exported(folder, "torch", *options)
    assert "export-torch-placements.json" in said
    ungathered = sum(map(cannot_gather, stage_placements(path)[stage].parameters.values()))
    assert ("DTensor divides so and cannot gather" in said) == bool(ungathered)
    sharding = _sharding(plan, stage, 0)
    devices = plan.stages[stage].devices
    by_rank: list[Held] = run_processes(distributed, devices, path, stage, free_port())
    whole = tensors()
    assert by_rank[0].keys() == sharding.placed.keys() & whole.keys()
    assert any(map(sharding.is_divided, by_rank[0]))
    for device, held in enumerate(by_rank):
        sharding = _sharding(plan, stage, device)
        for name, (local, full) in held.items():
            assert np.array_equal(local, sharding.local_part(name, whole[name]).numpy()), name
            assert np.array_equal(full, whole[name].numpy()), name


def _sharding(plan: Plan, stage: int, device: int) -> ShardedStage:
    """What the device has of a stage whose parameters are as they are requested."""
    planned = PlannedPasses.of(plan, stage, device, tensors().keys())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors().items()}
    return ShardedStage(planned, dict(planned.requests.parameters), shapes, {})


@pytest.mark.slow
def test_torchtitan_has_the_parameters_of_the_modules_of_each_stage(folder: Path) -> None:
    options = ("--machines", "4", "--mesh", "2", "--straight")
    plan, path, said = exported(folder, "torchtitan", *options)
    content = json.loads((folder / "plan/export-torchtitan.json").read_text())
    assert content["tensor_parallel_degree"] == 2
    assert content["data_parallel_replicate_degree"] == 1
    stages = stage_placements(path)
    for modules, stage in zip(content["module_fqns_per_model_part"], stages, strict=True):
        assert stage.parameters
        assert all(name.startswith(tuple(f"{m}." for m in modules)) for name in stage.parameters)
    names = [name for stage in stages for name in stage.parameters]
    assert sorted(names) == sorted(
        name
        for stage in plan.stages
        if stage.placements is not None
        for name in stage.placements.parameters
    )
    assert "DTensor has that as _StridedShard alone" in said


@pytest.mark.slow
def test_plans_without_meshes_have_no_file(folder: Path) -> None:
    exported(folder, "torch", "--machines", "2", "--mesh", "2")
    _, path, said = exported(folder, "torch", "--machines", "2", "--intra-op", "none")
    assert not path.exists(), "that of an earlier plan"
    assert "placements" not in said


def test_uneven_parts_are_told(folder: Path) -> None:
    """The places of 6 words among 4 devices."""
    shard = ("--shard", "places.weight=S(0)")
    _, _, said = exported(folder, "torch", "--machines", "4", "--mesh", "4", *shard)
    (line,) = (line for line in said.splitlines() if "not divided evenly" in line)
    assert "places.weight" in line


@pytest.mark.parametrize("text", ["Partial()", "Shard(0, split_factor=2)", "_StridedShard(0)"])
def test_other_placements_are_told_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "placements.json"
    stage = {"mesh": [2], "parameters": {"weight": [text]}}
    path.write_text(json.dumps({"format": "pipedream-dtensor/1", "stages": [stage]}))
    with pytest.raises(UserError, match="is no placement: export the plan again"):
        stage_placements(path)

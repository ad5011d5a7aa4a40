"""Placements of parameters as torch's DTensor has them, read from export-NAME-placements.json.

placed = stage_placements("export-torch-placements.json")[stage]
mesh = init_device_mesh("cuda", placed.mesh)
distribute_tensor(parameter, mesh, placed.parameters[name])
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from pipedream.graph.errors import UserError, read_artifact

_SHARD = re.compile(r"(_Strided)?Shard\(([0-9]+)(?:, split_factor=([0-9]+))?\)")


class StageText(BaseModel):
    """A stage as the file has it; `mesh` is null where it is not on one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mesh: tuple[PositiveInt, ...] | None
    parameters: dict[str, tuple[str, ...]]


class PlacementsFile(BaseModel):
    """The file as pd-optimize writes it, by stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["pipedream-dtensor/1"]
    stages: tuple[StageText, ...] = Field(min_length=1)


class StagePlacements(NamedTuple):
    """The shape of a stage's mesh, () if it has none, and a placement of each parameter and buffer
    for each of its axes.
    """

    mesh: tuple[int, ...]
    parameters: dict[str, tuple[Placement, ...]]


def stage_placements(path: Path | str) -> list[StagePlacements]:
    """Reads those of each stage. Raises UserError if the file is none of pd-optimize --export."""
    path = Path(path)
    return [
        StagePlacements(
            stage.mesh or (),
            {
                name: tuple(_placement(text, path) for text in texts)
                for name, texts in stage.parameters.items()
            },
        )
        for stage in read_artifact(path, PlacementsFile).stages
    ]


def _placement(text: str, path: Path) -> Placement:
    if text == "Replicate()":
        return Replicate()
    match = _SHARD.fullmatch(text)
    if match is None or bool(match[1]) != bool(match[3]):
        raise UserError(f"{path}: {text!r} is no placement: export the plan again")
    if match[1]:
        return _StridedShard(int(match[2]), split_factor=int(match[3]))
    return Shard(int(match[2]))

"""How sure the times of a profile are, and for which batch size: a part of profile.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from pipedream.graph.artifact import read_artifact
from pipedream.graph.command import UserError
from pipedream.graph.model import Graph


class _Seconds(BaseModel):
    lower: float = Field(ge=0, allow_inf_nan=False)
    upper: float = Field(ge=0, allow_inf_nan=False)

    @property
    def spread(self) -> float:
        return abs(self.upper - self.lower) / 2


class _Node(BaseModel):
    id: str
    forward_seconds: _Seconds
    backward_seconds: _Seconds


class _Profile(BaseModel):
    """What of profile.json is needed here; the rest may be whatever it is."""

    model_config = ConfigDict(extra="ignore")

    format: str
    graph_fingerprint: str
    batch_size: int = Field(ge=1)
    nodes: tuple[_Node, ...]


@dataclass(frozen=True)
class Timings:
    """`forward` and `backward`: for each node half of what its quartiles are apart, in seconds."""

    batch_size: int
    forward: Mapping[str, float]
    backward: Mapping[str, float]


def read_timings(path: Path, graph: Graph) -> Timings:
    """Raises UserError if there is no such file, or it is not the profile of `graph`."""
    profile = read_artifact(path, _Profile)
    known = {node.id: node for node in profile.nodes}
    if profile.graph_fingerprint != graph.fingerprint or known.keys() != graph.nodes.keys():
        raise UserError(f"{path}: the profile of another graph: run pd-profile again")
    return Timings(
        profile.batch_size,
        {name: node.forward_seconds.spread for name, node in known.items()},
        {name: node.backward_seconds.spread for name, node in known.items()},
    )

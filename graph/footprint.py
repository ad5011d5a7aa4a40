"""What the nodes of a graph keep in memory, as pd-profile measured it: a part of profile.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from pipedream.graph.artifact import read_artifact
from pipedream.graph.command import UserError
from pipedream.graph.model import Graph


@dataclass(frozen=True)
class Footprint:
    """Bytes of one node for one minibatch.

    `saved`: what the node makes and the backward pass needs; `workspace`: what its backward pass
    needs beside that, with the gradients it makes; `given`: of an input of the model, its size.
    """

    saved: float
    workspace: float
    given: float = 0.0


class _Tensor(BaseModel):
    bytes: float = Field(ge=0, allow_inf_nan=False)


class _Node(BaseModel):
    id: str
    outputs: tuple[_Tensor, ...]
    saved_bytes: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    workspace_bytes: float | None = Field(default=None, ge=0, allow_inf_nan=False)


class _Profile(BaseModel):
    """What of profile.json is needed here; the rest may be whatever it is."""

    model_config = ConfigDict(extra="ignore")

    format: str
    graph_fingerprint: str
    nodes: tuple[_Node, ...]


def read_footprints(path: Path, graph: Graph) -> Mapping[str, Footprint] | None:
    """The footprint of every node of `graph`; None if the profile has none.

    Raises UserError if there is no such file, or it is of another graph.
    """
    profile = read_artifact(path, _Profile)
    known = {node.id: node for node in profile.nodes}
    if profile.graph_fingerprint != graph.fingerprint or known.keys() != graph.nodes.keys():
        raise UserError(f"{path}: the profile of another graph: run pd-profile again")
    found = {}
    for name, node in known.items():
        if node.saved_bytes is None or node.workspace_bytes is None:
            return None
        given = sum(tensor.bytes for tensor in node.outputs)
        is_input = graph.nodes[name].is_input
        found[name] = Footprint(node.saved_bytes, node.workspace_bytes, given if is_input else 0.0)
    return found

"""Which module of the model each node is a call of, as profile.json tells it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pipedream.graph.artifact import read_artifact
from pipedream.graph.command import UserError
from pipedream.graph.model import Graph


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Tensor(_Part):
    name: str


class ModuleCall(_Part):
    """A node: `module`, the path of the module that it is a call of, "" for the model itself (of an
    operator: the module whose code has it); the parameters it reads; its `outputs`, the tensors
    that leave it, by their names in the exported graph.
    """

    id: str
    module: str
    parameters: tuple[str, ...]
    outputs: tuple[_Tensor, ...]


class _Machine(_Part):
    torch: str


class Modules(_Part):
    """The part of profile.json that an export needs."""

    model: str
    machine: _Machine
    graph_fingerprint: str
    nodes: tuple[ModuleCall, ...]

    @property
    def calls(self) -> Mapping[str, ModuleCall]:
        return {node.id: node for node in self.nodes}


def read_modules(path: Path, graph: Graph) -> Modules:
    """Reads profile.json. Raises UserError if it cannot be read, or is not this graph's."""
    modules = read_artifact(path, Modules)
    if modules.graph_fingerprint != graph.fingerprint:
        raise UserError(f"{path}: this is the profile of another graph; run pd-profile again")
    return modules

"""profile.json: what a profile measured, node by node, and on what. `pipedream-profile/1`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipedream.graph.artifact import read_artifact


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Seconds(_Part):
    """Median over the repeats, and the quartiles around it."""

    median: float = Field(ge=0)
    lower: float = Field(ge=0)
    upper: float = Field(ge=0)


class ProfiledTensor(_Part):
    """A tensor that leaves a node; `shape` with the batch dimension, `dtype` as `float32`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int = Field(ge=0)
    requires_grad: bool


class ProfiledNode(_Part):
    """A node of graph.txt: the module it is a call of, the parameters it reads, what leaves it.

    `saved_bytes` and `workspace_bytes` as in `pipedream.profiler.footprint`; `parameter_bytes` as
    in graph.txt, where a parameter that several nodes read counts once. None where an older version
    did not write them.
    """

    id: str
    description: str
    op: str
    module: str
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: tuple[ProfiledTensor, ...]
    forward_seconds: Seconds
    backward_seconds: Seconds
    saved_bytes: int | None = Field(default=None, ge=0)
    workspace_bytes: int | None = Field(default=None, ge=0)
    parameter_bytes: int | None = Field(default=None, ge=0)


class Machine(_Part):
    """Where it was measured; `threads` is torch's for one operator on the CPU."""

    device: str
    device_name: str
    threads: int
    python: str
    torch: str


class Totals(_Part):
    """Sums over the nodes: medians of the times, parameters each once."""

    forward_seconds: float
    backward_seconds: float
    parameter_bytes: float
    activation_bytes: float


class Profile(_Part):
    """Everything that graph.txt has no room for. `graph_fingerprint` is `Graph.fingerprint`."""

    format: Literal["pipedream-profile/1"] = "pipedream-profile/1"
    model: str
    args: dict[str, Any]
    batch_size: int = Field(ge=1)
    warmup: int = Field(ge=0)
    repeats: int = Field(ge=1)
    machine: Machine
    graph_fingerprint: str
    totals: Totals
    nodes: tuple[ProfiledNode, ...]


def read_profile(path: Path) -> Profile:
    """Reads profile.json. Raises UserError `FILE: where: what is wrong`."""
    return read_artifact(path, Profile)


def write_profile(profile: Profile, path: Path) -> None:
    path.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")

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

    Seconds are those of graph.txt, but for the loss, with the factors of the profile;
    `recomputed_seconds`: a forward pass that keeps nothing for a backward pass. `saved_bytes` and
    `workspace_bytes` as in `pipedream.profiler.footprint`. Parameters, their gradients and, by
    optimizer, what it keeps for them are in the bytes of the first node that reads them. None: not
    measured.
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
    recomputed_seconds: Seconds | None = None
    saved_bytes: int | None = Field(default=None, ge=0)
    workspace_bytes: int | None = Field(default=None, ge=0)
    parameter_bytes: int | None = Field(default=None, ge=0)
    gradient_bytes: int | None = Field(default=None, ge=0)
    optimizer_bytes: dict[str, int] = {}


class ProfiledLoss(_Part):
    """The loss of a run config. graph.txt has it in the last node that gives an output."""

    forward_seconds: Seconds
    backward_seconds: Seconds


class ProfiledUpdate(_Part):
    """A step of an optimizer: bytes of parameters in a second."""

    bytes_per_second: float = Field(gt=0)


class Passes(_Part):
    """Seconds of one direction: the sum over nodes before the factor, and measured in one piece."""

    summed: float = Field(ge=0)
    measured: float = Field(ge=0)


class ProfiledStretch(_Part):
    """`nodes` nodes, one after another, that were also measured in one piece, as a stage runs.

    `first` and `last` are the ids of those at its ends.
    """

    first: str
    last: str
    nodes: int = Field(ge=1)
    forward: Passes
    backward: Passes


class Fitted(_Part):
    """A stretch takes `call_seconds` and the sum over its nodes, whose times are `factor` times
    what was measured; `typical_error` (the median) and `worst_error` are what is left, as parts.
    """

    call_seconds: float = Field(ge=0)
    factor: float = Field(gt=0)
    typical_error: float = Field(ge=0)
    worst_error: float = Field(ge=0)


class Machine(_Part):
    """Where it was measured; `threads` is torch's for one operator on the CPU, `workers` how many
    processes were at work at once.
    """

    device: str
    device_name: str
    threads: int
    python: str
    torch: str
    workers: int = Field(default=1, ge=1)
    libraries: dict[str, str] = {}


class Totals(_Part):
    """Sums over the nodes: medians of the times, parameters each once."""

    forward_seconds: float
    backward_seconds: float
    parameter_bytes: float
    activation_bytes: float


class Profile(_Part):
    """Everything that graph.txt has no room for. `graph_fingerprint` is `Graph.fingerprint`.

    `forward` and `backward` say how the nodes were fitted to `stretches`; None where nodes were
    timed one by one. `updates` go by optimizer. `pass_seconds`: what each repeat of a pass of the
    whole model took, forward and backward, in their order. `reading_seconds`: what reading a
    minibatch of the data takes from the passes, where there are data; nothing beside a GPU.
    """

    format: Literal["pipedream-profile/1"] = "pipedream-profile/1"
    model: str
    args: dict[str, Any]
    batch_size: int = Field(ge=1)
    warmup: int = Field(ge=0)
    repeats: int = Field(ge=1)
    machine: Machine
    graph_fingerprint: str
    totals: Totals
    forward: Fitted | None = None
    backward: Fitted | None = None
    stretches: tuple[ProfiledStretch, ...] = ()
    loss: ProfiledLoss | None = None
    updates: dict[str, ProfiledUpdate] = {}
    pass_seconds: tuple[float, ...] = ()
    reading_seconds: float | None = Field(default=None, ge=0)
    nodes: tuple[ProfiledNode, ...]


def read_profile(path: Path) -> Profile:
    """Reads profile.json. Raises UserError `FILE: where: what is wrong`."""
    return read_artifact(path, Profile)


def write_profile(profile: Profile, path: Path) -> None:
    path.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")

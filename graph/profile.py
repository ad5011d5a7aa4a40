"""profile.json: the measured time and memory of each node. Format `pipedream-profile/1`.

A folder may hold profiles of one model at several batch sizes, in `batch-1`, `batch-2` and so on,
and such folders for several sequence lengths, in `sequence-2048` and so on.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from pipedream.graph.command import write_whole
from pipedream.graph.errors import ArtifactModel, UserError, read_artifact
from pipedream.graph.model import Graph
from pipedream.graph.run_config import BY_GROUPS
from pipedream.graph.variation import PassVariation, in_all

_MIDDLE_HALF = 0.6745
"""Half of a normal distribution lies within so many standard deviations."""

_NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Bytes = Annotated[int, Field(ge=0)]


BATCH_SIZES_TABLE = "batch_sizes.csv"
"""Written by pd-profile next to the profiles, and by pd-optimize next to the plan."""

UNKNOWN_ERROR = 0.3
"""Taken of an estimate where nobody has compared such estimates with measurements."""

_NAME = re.compile(r"batch-([1-9][0-9]*)")
_SEQUENCE = re.compile(r"sequence-([1-9][0-9]*)")


class Quartiles(ArtifactModel):
    """Seconds over the repeats of a measurement: the median and the lower and upper quartile."""

    median: _NonNegative
    lower: _NonNegative
    upper: _NonNegative

    @staticmethod
    def of(seconds: Sequence[float]) -> Quartiles:
        """Returns the quartiles of one or more values."""
        if len(seconds) == 1:
            return Quartiles(median=seconds[0], lower=seconds[0], upper=seconds[0])
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        return Quartiles(median=median, lower=lower, upper=upper)

    def scaled(self, factor: float) -> Quartiles:
        """Returns the quartiles of what takes so many times as long."""
        return Quartiles(
            median=factor * self.median, lower=factor * self.lower, upper=factor * self.upper
        )

    @property
    def spread(self) -> float:
        """Returns half the distance between the quartiles."""
        return abs(self.upper - self.lower) / 2


class ProfiledTensor(ArtifactModel):
    """A tensor that leaves a node."""

    name: str
    shape: tuple[int, ...]
    """With the batch dimension."""
    dtype: str
    """Such as `float32`."""
    bytes: _Bytes
    requires_grad: bool


class ProfiledNode(ArtifactModel):
    """A node of graph.txt. None stands for what was not measured.

    What belongs to a parameter is counted at the first node that reads it.
    """

    id: str
    """As in graph.txt."""
    description: str
    op: str
    """The operator."""
    module: str
    """Path of the module that the node is a call of."""
    inputs: tuple[str, ...]
    """Ids of the nodes it reads from."""
    parameters: tuple[str, ...]
    """Names of the parameters it reads."""
    outputs: tuple[ProfiledTensor, ...]
    """The tensors that leave it."""
    forward_seconds: Quartiles
    """As in graph.txt, but without the loss."""
    backward_seconds: Quartiles
    """As in graph.txt, but without the loss."""
    backward_input_seconds: Quartiles | None = None
    """The part of `backward_seconds` for gradients of its inputs, which other nodes wait for."""
    backward_weight_seconds: Quartiles | None = None
    """The rest, for the gradients of its parameters."""
    recomputed_seconds: Quartiles | None = None
    """A forward pass that keeps nothing for a backward pass."""
    saved_bytes: _Bytes | None = None
    """What it makes and a backward pass needs."""
    program_saved_bytes: _Bytes | None = None
    """The same where passes are programs, in halves and on meshes, if stages are compiled; else
    None."""
    kept_bytes: _Bytes | None = None
    """What it makes, gradients of its outputs included, and gradients of parameters need once those
    of inputs are there."""
    workspace_bytes: _Bytes | None = None
    """What its own backward pass needs in addition, including gradients."""
    parameter_bytes: _Bytes | None = None
    gradient_bytes: _Bytes | None = None
    """Of the gradients of its parameters."""
    optimizer_bytes: dict[str, int] = Field(default_factory=dict)
    """By optimizer: what it keeps for its parameters."""
    basis_bytes: _Bytes | None = None
    """What Adam with basis_rotation, as it is by default, keeps for its parameters in addition."""
    basis_workspace_bytes: _Bytes | None = None
    """The most that finding the bases of one of its parameters needs for a while."""
    update_seconds: dict[str, _NonNegative] = Field(default_factory=dict)
    """By optimizer that does not treat all parameters alike: what a step takes for its own."""

    @property
    def is_input(self) -> bool:
        """Tells whether this is an input, like `Node.is_input`."""
        return self.description.startswith("Input")


class SharedParameter(ArtifactModel):
    """A parameter that several nodes read, such as tied weights."""

    bytes: _Bytes
    learns: bool
    """Whether it is trained: one that is frozen may be anywhere."""


class ProfiledLoss(ArtifactModel):
    """The loss of a run config; graph.txt includes it in the last node that gives an output."""

    forward_seconds: Quartiles
    backward_seconds: Quartiles


class CompiledWay(ArtifactModel):
    """One way to compile, or not to."""

    compile: str | None
    """As `Profile.compile`."""
    seconds: _Positive
    """Of a pass of the whole model, forward and backward."""
    compile_seconds: _NonNegative
    """What it takes to compile the whole model, with what caches hold."""
    groups: int = Field(ge=1)
    """Parts that are compiled by themselves."""
    forms: int = Field(ge=1)
    """Of these, how many differ."""


class ProfiledGroups(ArtifactModel):
    """Groups of operators that are equal: they are compiled as one function, or run as they are."""

    module: str
    """The path of the first one."""
    groups: int = Field(ge=1)
    nodes: tuple[str, ...]
    """Of all."""
    eager_seconds: _Positive
    """Of the first one, forward and backward."""
    compiled_seconds: _Positive | None = None
    """None if it cannot be compiled."""
    compile_seconds: _NonNegative | None = None
    """What it takes to compile it, with what caches hold."""
    eager_saved_bytes: _Bytes
    """What its forward pass keeps for the backward pass, and does not have before."""
    compiled_saved_bytes: _Bytes | None = None
    compiled: bool
    """Whether it is, as that is faster."""


class ProfiledUpdate(ArtifactModel):
    """A step of an optimizer, in bytes of parameters."""

    bytes_per_second: _Positive
    """With a copy of the older version, as weight stashing has it."""
    in_place_bytes_per_second: _Positive | None = None
    """Without that copy, if it was measured apart."""


class Passes(ArtifactModel):
    """Seconds of one direction."""

    summed: _NonNegative
    """The sum over the nodes, before the factor."""
    measured: _NonNegative
    """In one piece."""


class ProfiledStretch(ArtifactModel):
    """Consecutive nodes that were also measured in one piece, as a stage runs."""

    first: str
    """Id of the first node."""
    last: str
    """Id of the last node."""
    nodes: int = Field(ge=1)
    """Number of nodes."""
    forward: Passes
    backward: Passes


class DirectionFit(ArtifactModel):
    """Says how the times of nodes were fitted to those of stretches, forward or backward."""

    call_seconds: _NonNegative
    """What a call of a stretch takes, whatever its nodes."""
    factor: _Positive
    """What the measured times of nodes were multiplied by."""
    typical_error: _NonNegative
    """Median relative error of a stretch after the fit."""
    worst_error: _NonNegative
    """The largest such error."""


class Machine(ArtifactModel):
    """Says where it was measured."""

    device: str
    device_name: str
    threads: int
    """Of torch, for one operator on the CPU."""
    python: str
    torch: str
    workers: int = Field(default=1, ge=1)
    """Processes at work at the same time."""
    libraries: dict[str, str] = Field(default_factory=dict)
    """Versions of the libraries that the model comes from."""


class ProfiledProcess(ArtifactModel):
    """What a process holds beside its tensors, by the allocator of this machine."""

    baseline_bytes: _Bytes
    """Resident after a first pass, without the tensors of the model and mapped files, of which the
    system can take memory back: Python, torch, the capture, and what libraries keep."""
    gaps: dict[str, tuple[_NonNegative, _NonNegative]]
    """What the allocator adds in passes to their bytes, relative to these: gaps between blocks, and
    blocks that were freed and kept; with one minibatch in flight, and for each further one. Of
    parts of the graph, each from the node of this name to the one before the next, in the order of
    the graph."""

    def of_nodes(self, order: Iterable[str]) -> dict[str, tuple[float, float]]:
        """Returns the gaps for each node, of all nodes in the order of the graph."""
        gaps, last = {}, next(iter(self.gaps.values()), (0.0, 0.0))
        for name in order:
            last = gaps[name] = self.gaps.get(name, last)
        return gaps

    def scaled(self, ratio: float) -> ProfiledProcess:
        """Returns the same where gaps take `ratio` times as much."""
        gaps = {name: (ratio * one, ratio * more) for name, (one, more) in self.gaps.items()}
        return self.model_copy(update={"gaps": gaps})


class Estimated(ArtifactModel):
    """Says that nothing was measured: times follow from flops and bytes of the operators."""

    device: str
    """The device file."""
    error: _NonNegative | None
    """How far whole passes of other models were from such estimates: relative, half of the models
    by less; None if that was not compared."""
    worst: _NonNegative | None
    """The same of the model that it was worst for."""
    peak: _Positive
    """Flops per second that the device cannot exceed, in the type of most of the products."""
    host_bandwidth: _Positive | None = None
    """Bytes per second that copies between the device and its host are taken to get, each way."""
    fp8: bool = False
    """Whether products are taken to be computed in fp8: a what-if."""

    @property
    def deviation(self) -> float:
        """Returns the relative standard deviation of such estimates, half of which are within
        `error`; an error of `UNKNOWN_ERROR` where it was not measured.
        """
        return (UNKNOWN_ERROR if self.error is None else self.error) / _MIDDLE_HALF

    @property
    def words(self) -> str:
        """Names the device, and says how far such estimates have been from measurements."""
        if self.fp8:
            return (
                f"{self.device}, if products were computed in fp8, without what casts take, and all"
                " else in bfloat16; how far off that is was not measured"
            )
        if self.error is None or self.worst is None:
            return f"{self.device}; how far off that is was not measured"
        return (
            f"{self.device}; for other models half of such estimates were within {self.error:.0%},"
            f" the worst {self.worst:.0%} off"
        )


class Totals(ArtifactModel):
    """Sums over the nodes; of times the medians, each parameter once."""

    forward_seconds: float
    backward_seconds: float
    parameter_bytes: float
    activation_bytes: float


class Profile(ArtifactModel):
    """Holds everything that graph.txt has no room for."""

    format: Literal["pipedream-profile/1"] = "pipedream-profile/1"
    model: str
    """The source of the model."""
    args: dict[str, Any]
    """The arguments of its factory."""
    batch_size: int = Field(ge=1)
    sequence: Annotated[int, Field(ge=1)] | None = None
    """Tokens of an example, as --sequence set them; None if it did not."""
    compile: str | None = None
    """torch.compile's backend that stages were measured with, after `groups:` if by groups; None if
    they are not compiled.
    """
    compile_compared: tuple[CompiledWay, ...] = ()
    """All ways, where the fastest was to be found."""
    compiled_groups: tuple[ProfiledGroups, ...] = ()
    """Groups that were tried, each by itself."""
    not_compiled: str | None = None
    """Why one could not be measured."""
    warmup: int = Field(ge=0)
    """Passes before the first that counted."""
    repeats: int = Field(ge=1)
    """Passes that counted."""
    machine: Machine
    estimated: Estimated | None = None
    """None if it was measured."""
    graph_fingerprint: str
    """`Graph.fingerprint`: a hash of the structure of graph.txt."""
    totals: Totals
    forward: DirectionFit | None = None
    """None if nodes were timed one by one."""
    backward: DirectionFit | None = None
    """None if nodes were timed one by one."""
    stretches: tuple[ProfiledStretch, ...] = ()
    loss: ProfiledLoss | None = None
    updates: dict[str, ProfiledUpdate] = Field(default_factory=dict)
    """By optimizer."""
    gradient_sum_bytes_per_second: _Positive | None = None
    """Bytes of gradients that are added to those of earlier minibatches of a round."""
    pass_seconds: tuple[_Positive, ...] = ()
    """What each repeat of a pass of the whole model took, forward and backward, in order."""
    pass_seconds_beside: tuple[tuple[_Positive, ...], ...] = ()
    """For each other worker, what a pass took it at the time of each of `pass_seconds`."""
    flops: _NonNegative | None = None
    """Of products, convolutions and attention in a forward and a backward pass; None without
    operators.json."""
    reading_seconds: _NonNegative | None = None
    """What reading a minibatch takes from the passes; None without data, and on a GPU 0."""
    process: ProfiledProcess | None = None
    """None on a GPU, and if whole passes did not fit into memory."""
    shared: dict[str, SharedParameter] | None = None
    """By name; None if they were not recorded."""
    no_operators: str | None = None
    """Why there is no operators.json, so that the model cannot run on meshes; None if there is."""
    nodes: tuple[ProfiledNode, ...]

    @model_validator(mode="after")
    def _check_passes(self) -> Profile:
        if any(len(other) != len(self.pass_seconds) for other in self.pass_seconds_beside):
            raise ValueError("pass_seconds_beside: give each worker one for each of pass_seconds")
        return self

    @cached_property
    def node(self) -> Mapping[str, ProfiledNode]:
        """Returns the nodes by id."""
        return {node.id: node for node in self.nodes}

    @property
    def eager_nodes(self) -> tuple[str, ...]:
        """Returns the nodes of groups that are not compiled, if stages are compiled by groups."""
        if self.compile is None or not self.compile.startswith(BY_GROUPS):
            return ()
        eager = (groups for groups in self.compiled_groups if not groups.compiled)
        return tuple(name for groups in eager for name in groups.nodes)

    def is_of(self, graph: Graph) -> bool:
        """Tells whether it was measured with this graph."""
        same = self.graph_fingerprint == graph.fingerprint
        return same and self.node.keys() == graph.nodes.keys()

    @property
    def tokens(self) -> int | None:
        """Returns the tokens of an example: those of --sequence, or where the model reads whole
        numbers [examples, tokens].
        """
        if self.sequence is not None:
            return self.sequence
        read = next(
            (node.outputs[0] for node in self.nodes if node.is_input and node.outputs), None
        )
        if read is None or len(read.shape) != 2 or not read.dtype.startswith("int"):
            return None
        return read.shape[1]

    @property
    def modules(self) -> Mapping[str, str]:
        """Returns the path of the module that each node is a call of, by id."""
        return {node.id: node.module for node in self.nodes}

    @property
    def footprints(self) -> Mapping[str, Footprint] | None:
        """Returns the footprint of every node by id; None if memory was not measured."""
        footprints = {}
        for node in self.nodes:
            if node.saved_bytes is None or node.workspace_bytes is None:
                return None
            input_bytes = sum(tensor.bytes for tensor in node.outputs) if node.is_input else 0
            own = node.saved_bytes, node.workspace_bytes, input_bytes, node.program_saved_bytes
            bases = node.basis_bytes or 0, node.basis_workspace_bytes or 0
            footprints[node.id] = Footprint(*own, *bases)
        return footprints

    @property
    def knows_bases(self) -> bool:
        """Tells whether it says what bases take: older profiles do not."""
        return all(node.basis_bytes is not None for node in self.nodes)

    @property
    def learned_together(self) -> tuple[Sharing, ...]:
        """Returns the parameters that several nodes read and that learn, as far as is known."""
        readers: dict[str, list[ProfiledNode]] = {}
        for node in self.nodes:
            for name in node.parameters:
                readers.setdefault(name, []).append(node)
        sharings = []
        for name, nodes in readers.items():
            known = (self.shared or {}).get(name)
            if len(nodes) > 1 and (known is None or known.learns):
                size = (nodes[0].parameter_bytes or 0) if known is None else known.bytes
                sharings.append(Sharing(name, tuple(node.id for node in nodes), size))
        return tuple(sharings)

    def divide_backward(self, graph: Graph) -> Graph:
        """Returns the graph with how backward passes divide, which graph.txt has no room for."""
        return graph.with_nodes(
            replace(
                graph.nodes[node.id],
                backward_input_share=_input_share(node, graph.nodes[node.id].backward_seconds),
                kept_bytes=node.kept_bytes,
            )
            for node in self.nodes
        )

    def updated_by(self, optimizer: str, graph: Graph) -> Graph:
        """Returns the graph with what this optimizer keeps for the parameters of each node, and how
        long it takes for them, where profiles tell parameters apart: see `Node`.
        """
        rate = self.updates.get(optimizer)
        known = [node for node in self.nodes if optimizer in node.update_seconds]
        if rate is None or not known:
            return graph
        return graph.with_nodes(
            replace(
                graph.nodes[node.id],
                update_bytes=node.update_seconds[optimizer] * rate.bytes_per_second,
                state_bytes=node.optimizer_bytes[optimizer],
            )
            for node in known
        )

    @property
    def title(self) -> str:
        """Returns the model and the batch size, for people."""
        return f"{self.model}, batch {self.batch_size}"

    @property
    def training_overheads(self) -> TrainingOverheads:
        """Returns the costs of training beyond those of the nodes."""
        return TrainingOverheads(
            {name: update.bytes_per_second for name, update in self.updates.items()},
            self.forward.call_seconds if self.forward else 0.0,
            self.backward.call_seconds if self.backward else 0.0,
            self.reading_seconds or 0.0,
            () if self.variation is None else self.variation.fast,
            self.gradient_sum_bytes_per_second or math.inf,
            self._uncertainty,
            {
                name: update.in_place_bytes_per_second
                for name, update in self.updates.items()
                if update.in_place_bytes_per_second is not None
            },
            0.0 if self.variation is None else self.variation.own,
        )

    @property
    def _uncertainty(self) -> Uncertainty:
        varied = self.variation
        estimated = 0.0 if self.estimated is None else self.estimated.deviation
        if varied is None:
            return Uncertainty(estimated=estimated)
        return Uncertainty(varied.drift, varied.of_median, estimated)

    @property
    def variation(self) -> PassVariation | None:
        """Returns how passes of the whole model vary; None if they were not timed."""
        if not self.pass_seconds:
            return None
        return PassVariation.of(self.pass_seconds, self.pass_seconds_beside)


class Uncertainty(NamedTuple):
    """Relative standard deviations of the times of a profile: by `drift` as it was seen, of the
    median of the passes, and of an estimate where nothing was measured. `others`: the logarithms of
    how many times as long passes took in further profiles of the model.
    """

    drift: float = 0.0
    of_median: float = 0.0
    estimated: float = 0.0
    others: tuple[float, ...] = ()


@dataclass(frozen=True)
class Footprint:
    """Bytes of one node for one minibatch.

    `saved`: memory that this node allocates and any backward pass needs, each tensor counted once,
    without parameters and buffers. `programs`: the same where passes are programs, None if it is no
    other: compiled whole passes compute again what they did not save. `workspace`: the most that
    the node's backward pass allocates on top of that: gradients of outputs, inputs and parameters,
    and scratch memory. `input_bytes`: the size of an input of the model. `bases`: what an optimizer
    with basis_rotation keeps for its parameters in addition, `finding` what it needs to find those
    of one parameter. `drawn`: of `saved`, random numbers and what was computed while they were
    drawn, which cannot be made again, where that is known. `share`: of what the node saves, what
    this device does.
    """

    saved: float
    workspace: float
    input_bytes: float = 0.0
    programs: float | None = None
    bases: float = 0.0
    finding: float = 0.0
    drawn: float = 0.0
    share: float = 1.0

    @property
    def in_programs(self) -> Footprint:
        """Returns that of the node in passes that are programs."""
        return self if self.programs is None else replace(self, saved=self.programs, programs=None)


class Sharing(NamedTuple):
    """A parameter and the nodes that read it. `bytes` are counted at the first of them."""

    parameter: str
    nodes: tuple[str, ...]
    bytes: float


@dataclass(frozen=True)
class TrainingOverheads:
    """Holds the costs of training beyond those of the nodes.

    `update_rates`: bytes of parameters per second of a step, by optimizer, with a copy of the older
    version; `in_place_rates`: without one, where that is known. `call_forward`, `call_backward`:
    seconds of each pass of a stage, whatever its nodes. `reading`: seconds that reading a minibatch
    takes from the passes of a stage that reads data. `spread`: passes of the whole model as
    multiples of their median, as `PassVariation.fast`. `gradient_sum_rate`: bytes of gradients per
    second that are added to those of earlier minibatches of a round. `uncertainty`: of all times.
    `own_drift`: as `PassVariation.own`.
    """

    update_rates: Mapping[str, float]
    call_forward: float = 0.0
    call_backward: float = 0.0
    reading: float = 0.0
    spread: Sequence[float] = ()
    gradient_sum_rate: float = math.inf
    uncertainty: Uncertainty = field(default_factory=Uncertainty)
    in_place_rates: Mapping[str, float] = field(default_factory=dict)
    own_drift: float = 0.0

    @cached_property
    def in_all(self) -> tuple[float, ...]:
        """Returns equally likely times of a pass of a worker, as multiples of the median."""
        return in_all(self.spread, self.own_drift)

    def of_stage(self, stage: int, stages: int) -> tuple[float, float]:
        """Returns the seconds of a stage's forward and backward pass beyond those of its nodes.

        The first stage reads the inputs and the last one the targets.
        """
        reads = stage in (0, stages - 1)
        return self.call_forward + (self.reading if reads else 0.0), self.call_backward

    def sum_seconds(self, minibatches: float) -> float:
        """Returns the seconds per byte of parameters, on the average of so many minibatches of a
        round on a worker: of all but the first the gradients are added to those before them.
        """
        return (1 - 1 / max(1.0, minibatches)) / self.gradient_sum_rate


def read_profile_of(path: Path, graph: Graph) -> Profile:
    """Reads profile.json. Raises UserError if it is invalid or the profile of another graph."""
    profile = read_profile(path)
    if not profile.is_of(graph):
        raise UserError(f"{path}: the profile of another graph: run pd-profile again")
    return profile


def read_profile(path: Path) -> Profile:
    """Reads profile.json. Raises UserError `FILE: where: what is wrong`."""
    return read_artifact(path, Profile)


def write_profile(profile: Profile, path: Path) -> None:
    write_whole(path, profile.model_dump_json(indent=1) + "\n")


def folder_of(folder: Path, batch_size: int) -> Path:
    """Returns the folder of the profile at a batch size."""
    return folder / f"batch-{batch_size}"


def sizes_in(folder: Path) -> list[int]:
    """Returns the batch sizes that have a profile, in ascending order."""
    matches = (_NAME.fullmatch(path.parent.name) for path in folder.glob("batch-*/graph.txt"))
    return sorted(int(match[1]) for match in matches if match)


def sequence_folder(folder: Path, length: int) -> Path:
    """Returns the folder of the profiles at a sequence length, where there are several."""
    return folder / f"sequence-{length}"


def sequences_in(folder: Path) -> list[int]:
    """Returns the sequence lengths that have a folder, in ascending order."""
    matches = (_SEQUENCE.fullmatch(path.name) for path in folder.glob("sequence-*/"))
    return sorted(int(match[1]) for match in matches if match)


def difference(one: Graph, size: int, other: Graph, other_size: int) -> str | None:
    """Returns the first node in which two graphs differ, as text; None if the structures are equal.

    `size` and `other_size` are their batch sizes.
    """
    if one.fingerprint == other.fingerprint:
        return None
    for name, other_name in zip(one.order, other.order, strict=False):
        here, there = one.nodes[name].description, other.nodes[other_name].description
        if here != there:
            return f"{name} is {here} at {size} and {there} at {other_size}"
        if _inputs(one, name) != _inputs(other, other_name):
            return f"{name} ({here}) has other inputs at {other_size} than at {size}"
    return f"{len(one.nodes)} nodes at {size} and {len(other.nodes)} at {other_size}"


def _input_share(node: ProfiledNode, backward_seconds: float) -> float | None:
    """Returns the share of BI in the backward pass as graph.txt has it: rounded, and with the loss,
    which has no parameters.
    """
    if node.backward_weight_seconds is None or not backward_seconds:
        return None
    return max(0.0, 1.0 - node.backward_weight_seconds.median / backward_seconds)


def _inputs(graph: Graph, name: str) -> list[int]:
    return sorted(map(graph.order.index, graph.predecessors[name]))

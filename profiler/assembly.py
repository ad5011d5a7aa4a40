"""What pd-profile writes of a model, put together from its measurements."""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch

from pipedream.capture.captured import Captured, Value, leaves_node
from pipedream.comm.device.names import device_name
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node
from pipedream.graph.placements.operators import OperatorProfile
from pipedream.graph.plan import Plan
from pipedream.graph.profile import (
    Estimated,
    Footprint,
    Machine,
    Profile,
    ProfiledLoss,
    ProfiledNode,
    ProfiledTensor,
    ProfiledUpdate,
    SharedParameter,
    Totals,
)
from pipedream.graph.run_config import BasisRotationConfig
from pipedream.profiler.timing.backward_split import BackwardSplit
from pipedream.profiler.timing.local_operators import Shards
from pipedream.profiler.timing.stopping_rule import StoppingRule
from pipedream.profiler.timing.times import Times
from pipedream.profiler.timing.training_overheads import UpdateCost

_MODEL_LIBRARIES = ("torchvision", "transformers", "timm")

_ROTATION = BasisRotationConfig()


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement; `model` is its source, `args` the arguments of its factory.

    `meta`: the model has no memory, and only one node at a time gets some. `workers`: the processes
    that run the model at the same time, including this one. `shards`: the parts of operators that
    are timed. `backend`: torch.compile's, for models whose stages will be compiled, after BY_GROUPS
    if by groups; `auto` for inductor, whichever way is fastest. `sequence`: the tokens of an
    example, if they were asked for.
    """

    model: str
    args: Mapping[str, Any]
    batch_size: int
    device: torch.device
    stopping_rule: StoppingRule
    threads: int
    meta: bool = False
    workers: int = 1
    shards: Shards = None
    backend: str | None = None
    sequence: int | None = None

    def check(self, graph: Graph) -> None:
        """Raises UserError if the plan of --shards is of another graph."""
        planned = self.shards
        if isinstance(planned, Plan) and planned.graph.fingerprint != graph.fingerprint:
            raise UserError(
                "--shards: the plan is of another model, or of another torch: plan this one's"
                " graph.txt"
            )


@dataclass(frozen=True)
class Measured:
    """Holds what pd-profile writes of a model. Without `operators` the profile says why.
    `undivided`: what the user should know of a large part that cannot be divided.
    """

    graph: Graph
    profile: Profile
    operators: OperatorProfile | None = None
    undivided: str = ""


@dataclass(frozen=True)
class Measurements:
    """All measurements of a model. `estimated`: on which figures, if nothing was measured.
    `beside`: what passes took other workers, as `Contention.beside`.
    """

    captured: Captured
    machine: Machine
    times: Times
    kept: Mapping[str, Footprint]
    splits: Mapping[str, BackwardSplit]
    updates: Mapping[str, UpdateCost]
    gradient_sum_rate: float | None = None
    reading: float | None = None
    flops: float | None = None
    estimated: Estimated | None = None
    beside: tuple[tuple[float, ...], ...] = ()


def timed_graph(captured: Captured, times: Times) -> Graph:
    """Returns the graph with times; that of the loss is in the last node that returns an output."""

    def timed(node: Node) -> Node:
        timings = [times.nodes[node.id]]
        if times.loss is not None and node.id == captured.returning:
            timings.append(times.loss)
        return replace(
            node,
            forward_seconds=sum(timing.forward.median for timing in timings),
            backward_seconds=sum(timing.backward.median for timing in timings),
        )

    return captured.graph.with_nodes(map(timed, captured.graph.nodes.values()))


def profile_of(measured: Measurements, graph: Graph, settings: Settings) -> Profile:
    """Returns the profile; `graph` has the times."""
    nodes, times = graph.nodes.values(), measured.times
    leaving = _leaving(measured.captured)
    return Profile(
        model=settings.model,
        args=dict(settings.args),
        batch_size=settings.batch_size,
        sequence=settings.sequence,
        compile=times.backend,
        compile_compared=tuple(times.compared),
        compiled_groups=tuple(times.groups),
        not_compiled=times.refused,
        warmup=times.warmup,
        repeats=times.repeats,
        pass_seconds=tuple(each.seconds for each in times.passes),
        pass_seconds_beside=measured.beside,
        flops=measured.flops,
        reading_seconds=measured.reading,
        machine=measured.machine,
        estimated=measured.estimated,
        graph_fingerprint=graph.fingerprint,
        totals=Totals(
            forward_seconds=sum(node.forward_seconds for node in nodes),
            backward_seconds=sum(node.backward_seconds for node in nodes),
            parameter_bytes=sum(node.parameter_bytes for node in nodes),
            activation_bytes=sum(node.output_bytes for node in nodes),
        ),
        forward=times.forward,
        backward=times.backward,
        stretches=tuple(times.stretches),
        loss=None
        if times.loss is None
        else ProfiledLoss(forward_seconds=times.loss.forward, backward_seconds=times.loss.backward),
        updates={
            name: ProfiledUpdate(
                bytes_per_second=update.bytes_per_second,
                in_place_bytes_per_second=update.in_place_bytes_per_second,
            )
            for name, update in measured.updates.items()
        },
        gradient_sum_bytes_per_second=measured.gradient_sum_rate,
        shared=dict(_shared(measured.captured)),
        nodes=tuple(
            _node(measured, name, leaving[name], owned)
            for name, owned in _owned(graph, measured.captured)
        ),
    )


def _owned(graph: Graph, captured: Captured) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields each node with the parameters that no earlier node reads."""
    seen: set[str] = set()
    for name in graph.nodes:
        yield name, tuple(p for p in captured.parameters[name] if p not in seen)
        seen.update(captured.parameters[name])


def _shared(captured: Captured) -> Iterator[tuple[str, SharedParameter]]:
    """Yields the parameters that several nodes read."""
    readers = Counter(name for names in captured.parameters.values() for name in names)
    for name, count in readers.items():
        if count > 1:
            parameter = captured.module.get_parameter(name)
            yield name, SharedParameter(bytes=parameter.nbytes, learns=parameter.requires_grad)


def _leaving(captured: Captured) -> dict[str, list[Value]]:
    """Returns the values of each node that other nodes read or the model returns."""
    leaving: dict[str, list[Value]] = {name: [] for name in captured.graph.nodes}
    for maker in captured.module.graph.nodes:
        value = captured.values.get(maker.name)
        if value is not None and leaves_node(maker, captured.owner, captured.outputs):
            leaving[value.node].append(value)
    return leaving


def _node(
    measured: Measurements, name: str, leaving: list[Value], owned: tuple[str, ...]
) -> ProfiledNode:
    captured, timing = measured.captured, measured.times.nodes[name]
    node, kept = captured.graph.nodes[name], measured.kept[name]
    learned = [p for p in map(captured.module.get_parameter, owned) if p.requires_grad]
    split, backward = measured.splits.get(name), timing.backward
    return ProfiledNode(
        id=name,
        description=node.description,
        op=node.description.partition("(")[0],
        module=captured.module_paths[name],
        inputs=captured.graph.predecessors[name],
        parameters=captured.parameters[name],
        outputs=tuple(
            ProfiledTensor(
                name=value.name,
                shape=value.shape,
                dtype=str(value.dtype).removeprefix("torch."),
                bytes=value.bytes,
                requires_grad=value.requires_grad,
            )
            for value in leaving
        ),
        forward_seconds=timing.forward,
        backward_seconds=backward,
        backward_input_seconds=None if split is None else backward.scaled(split.input_share),
        backward_weight_seconds=None if split is None else backward.scaled(1.0 - split.input_share),
        recomputed_seconds=timing.recomputed,
        saved_bytes=int(kept.saved),
        program_saved_bytes=None if kept.programs is None else int(kept.programs),
        kept_bytes=None if split is None else split.kept_bytes,
        workspace_bytes=int(kept.workspace),
        parameter_bytes=int(node.parameter_bytes),
        gradient_bytes=sum(p.nbytes for p in learned),
        optimizer_bytes={
            kind: sum(update.state.get(p, 0) for p in owned)
            for kind, update in measured.updates.items()
        },
        basis_bytes=sum(_ROTATION.extra_bytes(p.shape, p.itemsize) for p in learned),
        basis_workspace_bytes=max(
            (_ROTATION.workspace_bytes(p.shape, p.itemsize) for p in learned), default=0
        ),
        update_seconds={
            kind: sum(update.seconds.get(p, 0.0) for p in owned)
            for kind, update in measured.updates.items()
            if update.seconds is not None
        },
    )


def machine_of(settings: Settings) -> Machine:
    """Describes the device that this process measures on."""
    return Machine(
        device=str(settings.device),
        device_name=device_name(settings.device),
        threads=settings.threads,
        workers=settings.workers,
        python=platform.python_version(),
        torch=str(torch.__version__),
        libraries=libraries(),
    )


def libraries() -> dict[str, str]:
    """Returns the versions of the libraries that may have created the model, and of CUDA."""
    versions = {name: version(name) for name in _MODEL_LIBRARIES if name in sys.modules}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    return versions

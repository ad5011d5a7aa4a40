"""A loaded model to a measured graph and its profile."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipedream.graph.command import UserError
from pipedream.graph.heap import keep_freed_memory
from pipedream.graph.model import Graph
from pipedream.profiler.capture import Captured, Value, capture, flatten_inputs
from pipedream.profiler.footprint import Footprint, footprints
from pipedream.profiler.precision import lowered
from pipedream.profiler.profile import (
    Machine,
    Profile,
    ProfiledNode,
    ProfiledTensor,
    Seconds,
    Totals,
)
from pipedream.profiler.source import Loaded
from pipedream.profiler.timing import Spread, Timing, time_nodes


@dataclass(frozen=True)
class Settings:
    """What the user chose. `model` and `args` are its source and the factory's arguments."""

    model: str
    args: Mapping[str, Any]
    batch_size: int
    device: torch.device
    warmup: int
    repeats: int
    threads: int


def measure(
    loaded: Loaded,
    settings: Settings,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Graph, Profile]:
    """Captures the model and times it. Raises UserError where it cannot be captured, or an index
    among the inputs is out of range.
    """
    torch.set_num_threads(settings.threads)
    keep_freed_memory()
    with lowered(loaded.autocast, torch.device("cpu")):
        captured = capture(loaded.model, loaded.args, loaded.kwargs)
    inputs = flatten_inputs(loaded.args, loaded.kwargs)
    try:
        with lowered(loaded.autocast, settings.device):
            kept = footprints(captured, inputs, settings.device)
            timings = time_nodes(
                captured, inputs, settings.warmup, settings.repeats, settings.device, progress
            )
    except IndexError as error:
        raise UserError(
            f"{settings.model} cannot run on these inputs: {error}: give fewer positions, or a "
            "lower bound of whole numbers, with --input or in the data"
        ) from error
    graph = captured.graph.with_nodes(
        replace(
            node,
            forward_seconds=timings[node.id].forward.median,
            backward_seconds=timings[node.id].backward.median,
        )
        for node in captured.graph.nodes.values()
    )
    return graph, _profile(captured, graph, timings, kept, settings)


def _profile(
    captured: Captured,
    graph: Graph,
    timings: Mapping[str, Timing],
    kept: Mapping[str, Footprint],
    settings: Settings,
) -> Profile:
    nodes = graph.nodes.values()
    leaving = _leaving(captured)
    return Profile(
        model=settings.model,
        args=dict(settings.args),
        batch_size=settings.batch_size,
        warmup=settings.warmup,
        repeats=settings.repeats,
        machine=_machine(settings),
        graph_fingerprint=graph.fingerprint,
        totals=Totals(
            forward_seconds=sum(node.forward_seconds for node in nodes),
            backward_seconds=sum(node.backward_seconds for node in nodes),
            parameter_bytes=sum(node.parameter_bytes for node in nodes),
            activation_bytes=sum(node.output_bytes for node in nodes),
        ),
        nodes=tuple(
            _node(captured, name, leaving[name], timings[name], kept[name]) for name in graph.nodes
        ),
    )


def _leaving(captured: Captured) -> dict[str, list[Value]]:
    """For each node its values that others read or the model returns."""
    leaving: dict[str, list[Value]] = {name: [] for name in captured.graph.nodes}
    for maker in captured.module.graph.nodes:
        value = captured.values.get(maker.name)
        if value is None:
            continue
        readers = {captured.owner.get(user.name, value.node) for user in maker.users}
        if maker.name in captured.outputs or readers - {value.node}:
            leaving[value.node].append(value)
    return leaving


def _node(
    captured: Captured, name: str, leaving: list[Value], timing: Timing, kept: Footprint
) -> ProfiledNode:
    description = captured.graph.nodes[name].description
    return ProfiledNode(
        id=name,
        description=description,
        op=description.partition("(")[0],
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
        forward_seconds=_seconds(timing.forward),
        backward_seconds=_seconds(timing.backward),
        saved_bytes=kept.saved,
        workspace_bytes=kept.workspace,
        parameter_bytes=int(captured.graph.nodes[name].parameter_bytes),
    )


def _seconds(spread: Spread) -> Seconds:
    return Seconds(median=spread.median, lower=spread.lower, upper=spread.upper)


def _machine(settings: Settings) -> Machine:
    cuda = settings.device.type == "cuda"
    return Machine(
        device=str(settings.device),
        device_name=torch.cuda.get_device_name(settings.device) if cuda else _processor(),
        threads=settings.threads,
        python=platform.python_version(),
        torch=str(torch.__version__),
    )


def _processor() -> str:
    """The CPU's name; Linux tells it in /proc/cpuinfo, elsewhere Python's guess must do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

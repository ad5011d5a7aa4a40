"""Measures a loaded model: its graph with times, its profile, and its operators."""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedream.capture.captured import Captured, Value, flatten_inputs, leaves_node, rebuild
from pipedream.capture.compute_settings import Precision, keep_freed_memory
from pipedream.capture.errors.capture_errors import failing_module
from pipedream.capture.export import capture
from pipedream.capture.fake_tensors import capture_fake
from pipedream.capture.grouping import undivided
from pipedream.capture.programs.joint import CannotDivide
from pipedream.capture.programs.loss_end import LossEnd, Target
from pipedream.capture.sources.load import Loaded
from pipedream.comm.device.memory import free_memory
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node
from pipedream.graph.placements.operators import OperatorProfile
from pipedream.graph.profile import (
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
from pipedream.graph.run_config import AUTO, BY_GROUPS, INDUCTOR
from pipedream.profiler.device import device_name, is_out_of_memory
from pipedream.profiler.memory import footprints
from pipedream.profiler.operators import profile_operators
from pipedream.profiler.stretches.full_pass import CannotCompile, passes, time_in_training
from pipedream.profiler.timing.backward_split import BackwardSplit, backward_splits
from pipedream.profiler.timing.contention import (
    contention,
    is_contending_process,
    run_contending_passes,
)
from pipedream.profiler.timing.per_node import time_per_node, time_per_node_fake
from pipedream.profiler.timing.stopping_rule import StoppingRule
from pipedream.profiler.timing.times import Times
from pipedream.profiler.timing.training_overheads import (
    UpdateCost,
    gradient_sum_rate,
    reading_seconds,
    updates,
)

_WAYS = (None, INDUCTOR, BY_GROUPS + INDUCTOR)
_MODEL_LIBRARIES = ("torchvision", "transformers", "timm")


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement; `model` is its source, `args` the arguments of its factory.

    `meta`: the model has no memory, and only one node at a time gets some. `workers`: the processes
    that run the model at the same time, including this one. `shards`: the numbers of devices for
    which local operators are timed; None for two, of the operators that take most.
    `backend`: torch.compile's, for models whose stages will be compiled, after BY_GROUPS if by
    groups; `auto` for inductor, whichever way is fastest.
    """

    model: str
    args: Mapping[str, Any]
    batch_size: int
    device: torch.device
    stopping_rule: StoppingRule
    threads: int
    meta: bool = False
    workers: int = 1
    shards: tuple[int, ...] | None = None
    backend: str | None = None


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
class _Measurements:
    """All measurements of a model."""

    captured: Captured
    times: Times
    kept: Mapping[str, Footprint]
    splits: Mapping[str, BackwardSplit]
    updates: Mapping[str, UpdateCost]
    gradient_sum_rate: float | None = None
    reading: float | None = None


def measure(
    loaded: Loaded, settings: Settings, progress: Callable[[float], None] = lambda part: None
) -> Measured:
    """Captures and measures the model; `progress` is called with the fraction done, from 0 to 1.

    Raises UserError if the model cannot be captured or cannot run on its inputs, and RuntimeError
    if memory is short.
    """
    torch.set_num_threads(settings.threads)
    keep_freed_memory()
    precision, rule = Precision(loaded.autocast, settings.device), settings.stopping_rule
    captured = (capture_fake if settings.meta else capture)(
        loaded.model, loaded.args, loaded.kwargs, precision=precision
    )
    inputs = flatten_inputs(loaded.args, loaded.kwargs)
    if is_contending_process():
        alongside = None if settings.backend == AUTO else settings.backend
        with precision.computing():
            run_contending_passes(passes(captured, inputs, settings.device, alongside))
        sys.exit()
    try:
        with precision.computing():
            kept = footprints(captured, inputs, settings.device, settings.meta)
            with contention(settings.workers - 1):
                times = _time(captured, inputs, loaded, kept, settings, progress)
                if not loaded.recorded:  # what is recorded are programs
                    kept = _as_compiled(kept, times.saved_parts)
                splits = backward_splits(captured, inputs, rule, settings.device, settings.meta)
                updated = updates(captured, settings.device)
                summed = gradient_sum_rate(captured, settings.device)
                read = reading_seconds(loaded, settings.batch_size, settings.device)
                graph = _timed(captured, times)
                found = _operators(captured, inputs, loaded, settings, graph)
    except CannotCompile as error:
        raise UserError(
            f"compile: {error}: measure and run it without (--compile none), or with another torch"
        ) from error
    except (IndexError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise _cannot_run(settings.model, error, loaded) from error
    measured = _Measurements(captured, times, kept, splits, updated, summed, read)
    profile = _profile(measured, graph, settings)
    if isinstance(found, CannotDivide):
        profile = profile.model_copy(update={"no_operators": str(found)})
        return Measured(graph, profile, None, undivided(captured))
    return Measured(graph, profile, found, undivided(captured))


def _operators(
    captured: Captured, inputs: Sequence[Tensor], loaded: Loaded, settings: Settings, graph: Graph
) -> OperatorProfile | CannotDivide:
    """Returns the operators of the passes, or why they cannot be had."""
    precision = Precision(loaded.autocast, settings.device).computing()
    ending, shards = _ending(loaded, captured), settings.shards
    of = captured, inputs, settings.batch_size, settings.device, precision, graph
    try:
        return profile_operators(*of, *ending, shards=shards)
    except CannotDivide as reason:
        return reason


def _cannot_run(model: str, error: Exception, loaded: Loaded) -> UserError:
    """Returns the error of a model that was captured, by shapes alone, and fails on its values."""
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if isinstance(error, IndexError):
        reason += (
            ": give fewer positions, or a lower bound of integers, with --input or in the data"
        )
    return UserError(f"{model} cannot run on these inputs: {reason}{_failing_layer(loaded)}")


def _failing_layer(loaded: Loaded) -> str:
    """Says where the model itself fails, in words, or empty."""
    if any(parameter.is_meta for parameter in loaded.model.parameters()):
        return ""
    try:
        with torch.no_grad():
            loaded.model(*loaded.args, **loaded.kwargs)
    except Exception as error:
        return failing_module(error, loaded.model)
    return ""


def _timed(captured: Captured, times: Times) -> Graph:
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


def _time(
    captured: Captured,
    inputs: Sequence[Tensor],
    loaded: Loaded,
    kept: Mapping[str, Footprint],
    settings: Settings,
    progress: Callable[[float], None],
) -> Times:
    """Times whole passes if they fit in memory, else node by node."""
    stopping_rule, device, backend = settings.stopping_rule, settings.device, settings.backend
    fits = not settings.meta and _needs(captured, kept) <= free_memory(device)
    if backend is not None and not fits:
        raise UserError(
            f"compile: {backend}: passes are measured compiled only where whole ones fit into"
            " memory: leave it out, with --compile none, or give a smaller --batch-size"
        )
    if settings.meta:
        return time_per_node_fake(captured, inputs, stopping_rule, device, progress)
    if not fits:
        return time_per_node(captured, inputs, stopping_rule, device, progress)
    loss = loaded.loss
    target = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), loaded.target)

    def loss_of(values: Mapping[str, Tensor]) -> Tensor:
        assert loss is not None
        output = rebuild([values[name] for name in captured.outputs], captured.out_spec)
        return loss(output, target)

    return time_in_training(
        captured,
        inputs,
        stopping_rule,
        device,
        loss_of if loss is not None else None,
        progress,
        _WAYS if backend == AUTO else (backend,),
    )


def _as_compiled(kept: Mapping[str, Footprint], parts: Mapping[str, float]) -> dict[str, Footprint]:
    """Returns what nodes save once they are compiled."""
    if not parts:
        return dict(kept)
    return {
        name: replace(each, saved=round(each.saved * parts.get(name, 1.0)), programs=each.saved)
        for name, each in kept.items()
    }


def _ending(loaded: Loaded, captured: Captured) -> tuple[LossEnd | None, Target | None]:
    """Returns what the passes end in, if there is a loss that can be part of them."""
    target = Target.of(loaded.target)
    if loaded.loss is None or target is None:
        return None, None
    return LossEnd(loaded.loss, captured.outputs, captured.out_spec), target


def _needs(captured: Captured, kept: Mapping[str, Footprint]) -> float:
    """Returns the bytes that a forward and a backward pass need."""
    parameters = sum(node.parameter_bytes for node in captured.graph.nodes.values())
    saved = sum(each.saved for each in kept.values())
    return 2 * parameters + saved + max(each.workspace for each in kept.values())


def _profile(measured: _Measurements, graph: Graph, settings: Settings) -> Profile:
    nodes, times = graph.nodes.values(), measured.times
    leaving = _leaving(measured.captured)
    return Profile(
        model=settings.model,
        args=dict(settings.args),
        batch_size=settings.batch_size,
        compile=times.backend,
        compile_compared=tuple(times.compared),
        compiled_groups=tuple(times.groups),
        not_compiled=times.refused,
        warmup=times.warmup,
        repeats=times.repeats,
        pass_seconds=tuple(times.pass_seconds),
        reading_seconds=measured.reading,
        machine=Machine(
            device=str(settings.device),
            device_name=device_name(settings.device),
            threads=settings.threads,
            workers=settings.workers,
            python=platform.python_version(),
            torch=str(torch.__version__),
            libraries=_libraries(),
        ),
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
            name: ProfiledUpdate(bytes_per_second=update.bytes_per_second)
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
    measured: _Measurements, name: str, leaving: list[Value], owned: tuple[str, ...]
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
    )


def _libraries() -> dict[str, str]:
    """Returns the versions of the libraries that may have created the model, and of CUDA."""
    versions = {name: version(name) for name in _MODEL_LIBRARIES if name in sys.modules}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    return versions

"""Measures a loaded model: its graph with times, its profile, and its operators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedream.capture.captured import Captured, flatten_inputs, rebuild
from pipedream.capture.compute_settings import Precision, keep_freed_memory, return_freed_memory
from pipedream.capture.errors.capture_errors import failing_module
from pipedream.capture.export import capture
from pipedream.capture.fake_tensors import capture_fake
from pipedream.capture.grouping import undivided
from pipedream.capture.programs.joint import CannotDivide
from pipedream.capture.programs.loss_end import LossEnd, Target
from pipedream.capture.sources.load import Loaded
from pipedream.comm.device.memory import free_memory
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph
from pipedream.graph.placements.operators import OperatorProfile, flops_of
from pipedream.graph.profile import Footprint
from pipedream.graph.run_config import AUTO, BY_GROUPS, INDUCTOR
from pipedream.profiler.assembly import (
    Measured,
    Measurements,
    Settings,
    machine_of,
    profile_of,
    timed_graph,
)
from pipedream.profiler.device import is_out_of_memory
from pipedream.profiler.memory import footprints
from pipedream.profiler.operators import profile_operators
from pipedream.profiler.process_memory import process_memory
from pipedream.profiler.stretches.full_pass import CannotCompile, passes, time_in_training
from pipedream.profiler.timing.backward_split import backward_splits
from pipedream.profiler.timing.contention import (
    Contention,
    contend,
    contention,
    is_contending_process,
)
from pipedream.profiler.timing.operator_times import tasks_on
from pipedream.profiler.timing.per_node import time_per_node, time_per_node_fake
from pipedream.profiler.timing.times import Times
from pipedream.profiler.timing.training_overheads import (
    gradient_sum_rate,
    reading_seconds,
    updates,
)

_WAYS = (None, INDUCTOR, BY_GROUPS + INDUCTOR)


def measure(
    loaded: Loaded, settings: Settings, progress: Callable[[float], None] = lambda part: None
) -> Measured:
    """Captures and measures the model; `progress` is called with the fraction done, from 0 to 1.

    Raises UserError if the model cannot be captured or cannot run on its inputs, and RuntimeError
    if memory is short.
    """
    torch.set_num_threads(settings.threads)
    return_freed_memory()
    precision, rule = Precision(loaded.autocast, settings.device), settings.stopping_rule
    captured = (capture_fake if settings.meta else capture)(
        loaded.model, loaded.args, loaded.kwargs, precision=precision
    )
    settings.check(captured.graph)
    inputs = flatten_inputs(loaded.args, loaded.kwargs)
    if is_contending_process():
        keep_freed_memory()
        alongside = None if settings.backend == AUTO else settings.backend
        with precision.computing():
            work = passes(captured, inputs, settings.device, alongside)
            contend(work, tasks_on(settings.device))
        sys.exit()
    try:
        with precision.computing():
            kept = footprints(captured, inputs, settings.device, settings.meta)
            process = None
            if settings.device.type == "cpu" and not settings.meta:
                process = process_memory(captured, inputs, kept)
            keep_freed_memory()
            with contention(settings.workers - 1) as others:
                times = _time(captured, inputs, loaded, kept, settings, progress)
                beside = others.beside(times.passes)
                if not loaded.recorded:  # what is recorded are programs
                    kept = _as_compiled(kept, times.saved_parts)
                splits = backward_splits(captured, inputs, rule, settings.device, settings.meta)
                updated = updates(captured, settings.device)
                summed = gradient_sum_rate(captured, settings.device)
                read = reading_seconds(loaded, settings.batch_size, settings.device)
                graph = timed_graph(captured, times)
                found = _operators(captured, inputs, loaded, settings, graph, others)
    except CannotCompile as error:
        raise UserError(
            f"compile: {error}: measure and run it without (--compile none), or with another torch"
        ) from error
    except (IndexError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise _cannot_run(settings.model, error, loaded) from error
    machine = machine_of(settings)
    flops = None if isinstance(found, CannotDivide) else flops_of(found.graph)
    measured = Measurements(
        *(captured, machine, times, kept, splits, updated, summed, read, flops), beside=beside
    )
    profile = profile_of(measured, graph, settings).model_copy(update={"process": process})
    if isinstance(found, CannotDivide):
        profile = profile.model_copy(update={"no_operators": str(found)})
        return Measured(graph, profile, None, undivided(captured))
    return Measured(graph, profile, found, undivided(captured))


def _operators(
    captured: Captured,
    inputs: Sequence[Tensor],
    loaded: Loaded,
    settings: Settings,
    graph: Graph,
    others: Contention,
) -> OperatorProfile | CannotDivide:
    """Returns the operators of the passes, or why they cannot be had."""
    precision = Precision(loaded.autocast, settings.device).computing()
    ending, shards = ending_of(loaded, captured), settings.shards
    of = captured, inputs, settings.batch_size, settings.device, precision, graph
    try:
        return profile_operators(*of, *ending, shards=shards, others=others)
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


def ending_of(loaded: Loaded, captured: Captured) -> tuple[LossEnd | None, Target | None]:
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

"""Times node by node, for models whose whole pass, or which themselves, do not fit in memory."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from pipedream.capture.captured import Captured
from pipedream.capture.fake_tensors import real_node_modules
from pipedream.capture.node_modules import (
    NodeModule,
    node_modules,
    preserve_model_state,
    run_in_order,
)
from pipedream.capture.segment import Segment
from pipedream.profiler.timing.passes import RandomGradients
from pipedream.profiler.timing.stopping_rule import Repeats, StoppingRule, no_garbage_collection
from pipedream.profiler.timing.stopwatch import Stopwatch, stopwatch
from pipedream.profiler.timing.times import Times, Timing

_REPEATS = 10
"""The most for a node that has memory for that time alone."""
_SECONDS = 5.0  # for such a node, at most


def time_per_node(
    captured: Captured,
    inputs: Sequence[Tensor],
    stopping_rule: StoppingRule,
    device: torch.device,
    progress: Callable[[float], None] = lambda part: None,
) -> Times:
    """Times every node of `captured`, forward and at once backward, on the model's own values.

    A repeat goes through all nodes, so that a slow moment of the machine affects one repeat of many
    nodes and not all repeats of one. Values are freed after their last reader. `inputs` are in the
    order of `captured.inputs` and take no time. `progress` is called with the fraction done, from 0
    to 1. Buffers are restored.
    """
    repeats = Repeats(stopping_rule)
    with preserve_model_state(captured), no_garbage_collection(), torch.enable_grad():
        timer = _NodeTimer(captured, inputs, device)
        turns = repeats.run(timer.run, _sum, progress)
    nodes = {
        node: Timing.of([turn.get(node, (0.0, 0.0)) for turn in turns])
        for node in captured.graph.nodes
    }
    return Times(nodes, len(repeats.warming), len(repeats.noted))


def time_per_node_fake(
    captured: Captured,
    inputs: Sequence[Tensor],
    stopping_rule: StoppingRule,
    device: torch.device,
    progress: Callable[[float], None] = lambda part: None,
) -> Times:
    """Measures like `time_per_node`, but with all repeats of a node before the next one gets
    memory.

    Nodes read random values, except for `inputs` (in the order of `captured.inputs`). Equal layers
    are measured minutes apart, and take the same time: each has the repeats of all of them.
    """
    watch, random = stopwatch(device), RandomGradients(device)
    seconds = min(stopping_rule.seconds, _SECONDS)
    rule = replace(stopping_rule, seconds=seconds, most=_REPEATS)

    def turn(node: NodeModule, values: Mapping[str, Tensor]) -> tuple[float, float]:
        return seconds_of(step(node, values, watch, random)[1], watch)

    kinds: dict[str, Hashable] = {}
    measured: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    counts: list[Repeats] = []
    with no_garbage_collection(), torch.enable_grad():
        for node, values in real_node_modules(captured, captured.on_device(inputs, device), device):
            counts.append(Repeats(rule))
            kinds[node.name] = kind = _kind(captured, node)
            measured[kind] += counts[-1].run(partial(turn, node, values), sum)
            progress(len(counts) / len(captured.working))
    pooled = {kind: Timing.of(turns) for kind, turns in measured.items()}
    nodes = dict.fromkeys(captured.graph.nodes, Timing.nothing())
    nodes |= {name: pooled[kind] for name, kind in kinds.items()}
    return Times(nodes, len(counts[0].warming), min(len(each.noted) for each in counts))


def _kind(captured: Captured, node: NodeModule) -> Hashable:
    """Returns what is the same for nodes that do the same: operator, settings, shapes and types."""
    names = (*node.segment.inputs, *node.segment.outputs)
    values = [captured.values[name] for name in names]
    description = captured.graph.nodes[node.name].description
    return description, tuple((tuple(value.shape), value.dtype) for value in values)


def _sum(turn: Mapping[str, tuple[float, float]]) -> float:
    return sum(forward + backward for forward, backward in turn.values())


Marks: TypeAlias = tuple[tuple[Any, Any], tuple[Any, Any]]
"""(start, end) of the forward and of the backward pass."""


class _NodeTimer:
    """Runs the model node by node, each followed at once by its backward pass."""

    def __init__(self, captured: Captured, inputs: Sequence[Tensor], device: torch.device) -> None:
        self.watch = stopwatch(device)
        self.inputs = captured.on_device(inputs, device)
        self.modules = node_modules(captured, device)
        self.gradients = RandomGradients(device)
        self.empty = empty_module()
        self.scalar = torch.ones(1, device=device)

    def run(self) -> dict[str, tuple[float, float]]:
        """Returns the seconds forward and backward of every node in one repeat."""
        values = dict(self.inputs)
        marks: dict[str, Marks] = {}
        floors: list[Marks] = []

        def run_node(node: NodeModule, values: Mapping[str, Tensor]) -> list[Tensor]:
            floors.append(step(self.empty, {"x": self.scalar}, self.watch, self.gradients)[1])
            outputs, marks[node.name] = step(node, values, self.watch, self.gradients)
            return outputs

        run_in_order(self.modules, values, run_node)
        # Read only now: waiting for a GPU after each node would leave it idle until the next one.
        return self._seconds(marks, floors)

    def _seconds(
        self, marks: Mapping[str, Marks], floors: Sequence[Marks]
    ) -> dict[str, tuple[float, float]]:
        """Subtracts the time of an empty module: a stage pays it once, here every node does."""
        forwards, backwards = zip(*(seconds_of(each, self.watch) for each in floors), strict=True)
        forward_floor, backward_floor = statistics.median(forwards), statistics.median(backwards)
        return {
            node: (max(forward - forward_floor, 0.0), max(backward - backward_floor, 0.0))
            for node, each in marks.items()
            for forward, backward in [seconds_of(each, self.watch)]
        }


def step(
    node: NodeModule, values: Mapping[str, Tensor], watch: Stopwatch, random: RandomGradients
) -> tuple[list[Tensor], Marks]:
    """Runs a node forward on its inputs among `values`, then backward: its outputs and marks."""
    inputs = node.inputs(values)
    watch.lead()
    start = watch.mark()
    outputs = node.segment.module(*inputs)
    forward = (start, watch.mark())
    backward = (start, start)
    ends, wanted = node.ends(inputs, outputs)
    if ends and wanted:
        gradients = [random.like(value) for value in ends]
        start = watch.mark()
        torch.autograd.grad(ends, wanted, gradients, allow_unused=True)
        backward = (start, watch.mark())
    return [value.detach() for value in outputs], (forward, backward)


def seconds_of(marks: Marks, watch: Stopwatch) -> tuple[float, float]:
    forward, backward = marks
    return watch.seconds(*forward), watch.seconds(*backward)


def empty_module() -> NodeModule:
    """Returns an empty module, whose time is contained in the time of every node."""
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    part = Segment(fx.GraphModule({}, graph), ("x",), ("x",))
    return NodeModule("", part, (True,), ())

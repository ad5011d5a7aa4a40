"""Times and memory of a fake model, with memory for one node at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pipedream.capture.captured import Captured
from pipedream.capture.fake_tensors import random_tensor, real_node_module
from pipedream.capture.node_modules import NodeModule
from pipedream.graph.profile import Footprint
from pipedream.profiler.memory import SavedMemory, metered
from pipedream.profiler.timing.backward_split import BackwardSplit, BackwardSplitter
from pipedream.profiler.timing.passes import RandomGradients
from pipedream.profiler.timing.per_node import seconds_of, step
from pipedream.profiler.timing.stopping_rule import Repeats, StoppingRule, no_garbage_collection
from pipedream.profiler.timing.stopwatch import stopwatch
from pipedream.profiler.timing.times import Times, Timing

_REPEATS = 10
_SECONDS = 5.0  # per node, at most


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
    watch = stopwatch(device)
    random = RandomGradients(device)
    rule = StoppingRule(
        stopping_rule.warmup, stopping_rule.repeats, min(stopping_rule.seconds, _SECONDS)
    )

    def turn(node: NodeModule, values: Mapping[str, Tensor]) -> tuple[float, float]:
        return seconds_of(step(node, values, watch, random)[1], watch)

    nodes = dict.fromkeys(captured.graph.nodes, Timing.nothing())
    kinds: dict[str, Hashable] = {}
    measured: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    counts: list[Repeats] = []
    with no_garbage_collection(), torch.enable_grad():
        for part, node, values in _real(captured, inputs, device):
            repeats = Repeats(rule)
            turns: list[tuple[float, float]] = []
            while repeats.warm(sum(turn(node, values))):
                pass
            more = True
            while more:
                turns.append(turn(node, values))
                enough = rule.repeats is None and len(turns) >= _REPEATS
                more = repeats.go_on(sum(turns[-1])) and not enough
            kinds[node.name] = kind = _kind(captured, node)
            measured[kind] += turns
            counts.append(repeats)
            progress(part)
    pooled = {kind: Timing.of(turns) for kind, turns in measured.items()}
    nodes |= {name: pooled[kind] for name, kind in kinds.items()}
    return Times(nodes, len(counts[0].warming), min(len(each.noted) for each in counts))


def _kind(captured: Captured, node: NodeModule) -> Hashable:
    """Returns what is the same for nodes that do the same: operator, settings, shapes and types."""
    names = (*node.segment.inputs, *node.segment.outputs)
    values = [captured.values[name] for name in names]
    description = captured.graph.nodes[node.name].description
    return description, tuple((tuple(value.shape), value.dtype) for value in values)


def footprints_fake(
    captured: Captured, inputs: Sequence[Tensor], device: torch.device
) -> dict[str, Footprint]:
    """Returns the same as `pipedream.profiler.memory.footprints`."""
    with torch.enable_grad(), metered(device) as meter:
        memory = SavedMemory(captured, {}, meter)
        for _, node, values in _real(captured, inputs, device):
            memory.run_node(node, values)
    return memory.footprints()


def backward_splits_fake(
    captured: Captured, inputs: Sequence[Tensor], stopping_rule: StoppingRule, device: torch.device
) -> dict[str, BackwardSplit]:
    """Returns the same as `backward_splits`."""
    splitter = BackwardSplitter(captured, {}, stopping_rule, device)
    with no_garbage_collection():
        for _, node, values in _real(captured, inputs, device):
            splitter.run_node(node, values)
    return splitter.splits()


def _real(
    captured: Captured, inputs: Sequence[Tensor], device: torch.device
) -> Iterator[tuple[float, NodeModule, Mapping[str, Tensor]]]:
    """Yields (fraction done, node, its inputs) for each node while it has memory."""
    model_inputs = {n: value.to(device) for n, value in zip(captured.inputs, inputs, strict=True)}
    known = captured.values

    def value(name: str) -> Tensor:
        if name in model_inputs:
            return model_inputs[name]
        return random_tensor(known[name].shape, known[name].dtype, device)

    for index, name in enumerate(captured.working, start=1):
        with real_node_module(captured, name, device) as node:
            part = index / len(captured.working)
            yield part, node, {name: value(name) for name in node.segment.inputs}

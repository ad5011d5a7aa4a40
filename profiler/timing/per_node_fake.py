"""Times and memory of a fake model, with memory for one node at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipedream.capture.export import Captured
from pipedream.capture.fake_tensors import random_tensor, real_node_module
from pipedream.capture.node_modules import NodeModule
from pipedream.graph.profile import Footprint, Quartiles
from pipedream.profiler.memory import Meter, address, metered, run_backward
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
    """Like `time_per_node`, but with all repeats of a node before the next one gets memory.

    Nodes read random values, except for `inputs` (in the order of `captured.inputs`).
    """
    watch = stopwatch(device)
    random = RandomGradients(device)
    rule = StoppingRule(
        stopping_rule.warmup, stopping_rule.repeats, min(stopping_rule.seconds, _SECONDS)
    )
    nodes = dict.fromkeys(captured.graph.nodes, Timing.nothing())
    counts: list[Repeats] = []
    with no_garbage_collection(), torch.enable_grad():
        for part, node, values in _real(captured, inputs, device):
            repeats, turns = Repeats(rule), []

            def turn(node: NodeModule = node, values: Mapping[str, Tensor] = values) -> list[float]:
                _, marks = step(node, values, watch, random)
                return list(seconds_of(marks, watch))

            while repeats.warm(sum(turn())):
                pass
            more = True
            while more:
                turns.append(turn())
                enough = rule.repeats is None and len(turns) >= _REPEATS
                more = repeats.go_on(sum(turns[-1])) and not enough
            nodes[node.name] = Timing(
                *(Quartiles.of([each[way] for each in turns]) for way in (0, 1))
            )
            counts.append(repeats)
            progress(part)
    return Times(nodes, len(counts[0].warming), min(len(each.noted) for each in counts))


def footprints_fake(
    captured: Captured, inputs: Sequence[Tensor], device: torch.device
) -> dict[str, Footprint]:
    """Like `pipedream.profiler.memory.footprints`."""
    memory = _FakeMemory(captured)
    with torch.enable_grad(), metered(device) as meter:
        for _, node, values in _real(captured, inputs, device):
            memory.enter(node, values, meter)
    peaks = meter.peaks()
    return {
        node: Footprint(memory.saved[node], peaks.get(node, 0)) for node in captured.graph.nodes
    }


class _FakeMemory:
    """Counts saved bytes, each value once, in the node that computes it.

    `first` maps a view to the value whose memory it shares.
    """

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.saved: Counter[str] = Counter()
        self.counted: set[str] = set()
        self.first: dict[str, str] = {}

    def enter(self, node: NodeModule, values: Mapping[str, Tensor], meter: Meter) -> None:
        packed: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            packed[address(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        inputs = node.inputs(values)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = node.segment.module(*inputs)
        own = {address(tensor) for tensor in node.parameters_and_buffers}
        names: dict[int, str] = {}
        for name, tensor in zip(node.segment.inputs, inputs, strict=True):
            names.setdefault(address(tensor), self.first.get(name, name))
        for name, tensor in zip(node.segment.outputs, outputs, strict=True):
            self.first[name] = names.setdefault(address(tensor), name)
        for place, size in packed.items():
            known = names.get(place)
            if place not in own and known not in self.counted:
                maker = self.captured.values[known].node if known else node.name
                self.saved[maker] += size
                self.counted |= {known} if known else set()
        run_backward(node, inputs, outputs, meter)


def _real(
    captured: Captured, inputs: Sequence[Tensor], device: torch.device
) -> Iterator[tuple[float, NodeModule, Mapping[str, Tensor]]]:
    """(fraction done, node, its inputs) for each node while it has memory."""
    own = {n: value.to(device) for n, value in zip(captured.inputs, inputs, strict=True)}
    known = captured.values

    def value(name: str) -> Tensor:
        if name in own:
            return own[name]
        return random_tensor(known[name].shape, known[name].dtype, device)

    for index, name in enumerate(captured.working, start=1):
        with real_node_module(captured, name, device) as node:
            part = index / len(captured.working)
            yield part, node, {name: value(name) for name in node.segment.inputs}

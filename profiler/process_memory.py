"""Measures what a process holds beside its tensors, and what the allocator adds to these."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pipedream.capture.captured import Captured
from pipedream.capture.compute_settings import keep_freed_memory
from pipedream.capture.node_modules import preserve_model_state
from pipedream.capture.segment import segment
from pipedream.comm.device.memory import (
    free_memory,
    give_back_freed,
    reset_peak_resident,
    resident_bytes,
)
from pipedream.graph.model import Graph
from pipedream.graph.profile import Footprint, ProfiledProcess

_PASSES = 8
"""With fewer the gaps between blocks have not come to what they will be."""
_FEWEST_BYTES = 64e6
"""Where passes need less, what libraries take at first use would be taken for the allocator's."""


@dataclass
class _Growth:
    bytes: int = 0


@contextmanager
def _growth() -> Iterator[_Growth]:
    """Measures by how much the resident memory of the process grows at most."""
    give_back_freed()
    before, growth = resident_bytes("RssAnon"), _Growth()
    reset_peak_resident()
    yield growth
    growth.bytes = resident_bytes("VmHWM") - resident_bytes("RssFile") - before


def process_memory(
    captured: Captured, inputs: Sequence[Tensor], kept: Mapping[str, Footprint]
) -> ProfiledProcess | None:
    """Runs passes of both halves of the model on the CPU as two stages run them: in the first, the
    forward pass of a minibatch comes before the backward pass of the one before it. What the
    allocator adds is counted for what is saved; gradients of parameters and workspaces find room
    that those of the minibatch before have left.

    From here on the process keeps what it frees, as in training. None if the passes would not fit
    into memory, or the system does not say what a process holds. Buffers are restored.
    """
    first, second = _halves(captured, kept)
    needed = [
        _needed(captured.graph, nodes, kept, in_flight)
        for nodes, in_flight in ((first, 2), (second, 1))
    ]
    own = sum(tensor.nbytes for tensor in (*captured.module.state_dict().values(), *inputs))
    give_back_freed()
    baseline = resident_bytes() - own
    keep_freed_memory()
    if baseline <= 0 or 2 * sum(map(sum, needed)) > free_memory(torch.device("cpu")):
        return None
    values = captured.on_device(inputs, torch.device("cpu"))
    grown = 0.0
    with preserve_model_state(captured), torch.enable_grad():
        for nodes, (_, rest), in_flight in zip((first, second), needed, (2, 1), strict=True):
            if not nodes:
                continue
            passes = _Passes(captured, nodes, values)
            values = passes.outputs()
            with _growth() as growth:
                passes.run(in_flight)
            grown += growth.bytes - rest
    passing = sum(each for each, _ in needed)
    overhead = max(1.0, grown / passing) if passing > _FEWEST_BYTES else 1.0
    return ProfiledProcess(baseline_bytes=baseline, overhead=overhead)


def _halves(
    captured: Captured, kept: Mapping[str, Footprint]
) -> tuple[Sequence[str], Sequence[str]]:
    """Divides the nodes in their order, at half of what they save."""
    nodes = list(captured.working)
    saved = list(accumulate(kept[name].saved for name in nodes))
    middle = sum(each <= saved[-1] / 2 for each in saved)
    return nodes[:middle], nodes[middle:]


def _needed(
    graph: Graph, nodes: Sequence[str], kept: Mapping[str, Footprint], in_flight: int
) -> tuple[float, float]:
    """Returns what passes of these nodes have at most: what was saved, and gradients with a
    workspace. At some node of a backward pass these are what nodes up to it have saved, gradients
    of those after it, and its workspace; and all that the minibatches behind have saved.
    """
    saved = list(accumulate(kept[name].saved for name in nodes))
    sizes = [graph.nodes[name].parameter_bytes for name in reversed(nodes)]
    gradients = list(accumulate(sizes, initial=0.0))
    workspaces = [kept[name].workspace for name in nodes]
    learned = map(sum, zip(reversed(gradients[:-1]), workspaces, strict=True))
    moments = zip(saved, learned, strict=True)
    most, rest = max(moments, key=sum, default=(0.0, 0.0))
    return most + (in_flight - 1) * (saved[-1] if saved else 0.0), rest


class _Passes:
    """Some nodes of the model as a stage. `values`: those that it reads, among others."""

    def __init__(
        self, captured: Captured, nodes: Sequence[str], values: Mapping[str, Tensor]
    ) -> None:
        self.part = segment(captured, nodes, keep=captured.outputs)
        learned = [each for each in self.part.state.values() if each.requires_grad]
        self.values = values
        self.given = [values[name].detach() for name in self.part.inputs]
        for name, value in zip(self.part.inputs, self.given, strict=True):
            value.requires_grad_(captured.values[name].requires_grad)
        self.wanted = [*learned, *(each for each in self.given if each.requires_grad)]

    def outputs(self) -> dict[str, Tensor]:
        """Returns what it reads and computes, by name."""
        with torch.no_grad():
            results = self.part.module(*self.given)
        return {**self.values, **dict(zip(self.part.outputs, results, strict=True))}

    def run(self, in_flight: int) -> None:
        ends = deque(self._forward() for _ in range(in_flight - 1))
        for _ in range(_PASSES):
            ends.append(self._forward())
            self._backward(ends.popleft())

    def _forward(self) -> list[Tensor]:
        return [each for each in self.part.module(*self.given) if each.requires_grad]

    def _backward(self, ends: Sequence[Tensor]) -> None:
        gradients = [torch.ones_like(end) for end in ends]
        if ends and self.wanted:
            torch.autograd.grad(ends, self.wanted, gradients, allow_unused=True)

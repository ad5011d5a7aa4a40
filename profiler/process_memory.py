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
_IN_FLIGHT = 2
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
    """Runs passes of the whole model on the CPU as a stage runs them, the forward pass of a
    minibatch before the backward pass of the one before it.

    From here on the process keeps what it frees, as in training. None if the passes would not fit
    into memory, or the system does not say what a process holds. Buffers are restored.
    """
    needed = sum(_needed(captured.graph, captured.working, kept, _IN_FLIGHT))
    own = sum(tensor.nbytes for tensor in (*captured.module.state_dict().values(), *inputs))
    give_back_freed()
    baseline = resident_bytes() - own
    keep_freed_memory()
    if baseline <= 0 or 2 * needed > free_memory(torch.device("cpu")):
        return None
    values = captured.on_device(inputs, torch.device("cpu"))
    with preserve_model_state(captured), torch.enable_grad():
        passes = _Passes(captured, captured.working, values)
        with _growth() as growth:
            passes.run(_IN_FLIGHT)
    overhead = max(1.0, growth.bytes / needed) if needed > _FEWEST_BYTES else 1.0
    return ProfiledProcess(baseline_bytes=baseline, overhead=overhead)


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
        self.given = [values[name].detach() for name in self.part.inputs]
        for name, value in zip(self.part.inputs, self.given, strict=True):
            value.requires_grad_(captured.values[name].requires_grad)
        self.wanted = [*learned, *(each for each in self.given if each.requires_grad)]

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

"""Measures what a process holds beside its tensors, and what the allocator adds to these."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
_FEWEST_BYTES = 32e6
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
    """Runs passes of the whole model on the CPU as stages run them, the forward pass of a minibatch
    before the backward pass of the one before it.

    From here on the process keeps what it frees, as in training. None if the passes would not fit
    into memory, or the system does not say what a process holds. Buffers are restored.
    """
    passes = _Passes(captured, inputs)
    needed = _needed(captured.graph, kept)
    own = sum(tensor.nbytes for tensor in (*passes.state.values(), *inputs))
    give_back_freed()
    baseline = resident_bytes() - own
    keep_freed_memory()
    if baseline <= 0 or 2 * needed > free_memory(torch.device("cpu")):
        return None
    with preserve_model_state(captured), torch.enable_grad(), _growth() as growth:
        passes.run()
    overhead = growth.bytes / needed if needed > _FEWEST_BYTES else 1.0
    return ProfiledProcess(baseline_bytes=baseline, overhead=max(1.0, overhead))


def _needed(graph: Graph, kept: Mapping[str, Footprint]) -> float:
    """Returns the most bytes of tensors that the passes make: at some node of a backward pass, what
    nodes before it have saved, gradients of those from there on, and its workspace; and all that
    the minibatch behind has saved.
    """
    nodes = graph.order
    saved = [kept[name].saved if name in kept else 0.0 for name in nodes]
    parameters = [graph.nodes[name].parameter_bytes for name in nodes]
    before, after = list(accumulate(saved)), [*accumulate(reversed(parameters)), 0.0][::-1]
    most = max(
        before[at] + after[at + 1] + (kept[name].workspace if name in kept else 0.0)
        for at, name in enumerate(nodes)
    )
    return most + (_IN_FLIGHT - 1) * before[-1]


@dataclass
class _Passes:
    """The model as one stage."""

    captured: Captured
    inputs: Sequence[Tensor]
    learned: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.part = segment(self.captured, self.captured.working, keep=self.captured.outputs)
        self.state = self.part.state
        self.learned = [each for each in self.state.values() if each.requires_grad]
        self.values = self.captured.on_device(self.inputs, torch.device("cpu"))

    def run(self) -> None:
        in_flight = deque([self._forward()])
        for _ in range(_PASSES):
            in_flight.append(self._forward())
            self._backward(in_flight.popleft())

    def _forward(self) -> list[Tensor]:
        given = [self.values[name] for name in self.part.inputs]
        results = self.part.module(*given)
        return [each for each in results if each.requires_grad]

    def _backward(self, ends: Sequence[Tensor]) -> None:
        gradients = [torch.ones_like(end) for end in ends]
        if ends and self.learned:
            torch.autograd.grad(ends, self.learned, gradients, allow_unused=True)

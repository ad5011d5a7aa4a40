"""Measures what a process holds beside its tensors, and what the allocator adds to these."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from time import monotonic

import torch
from torch import Tensor

from pipedream.capture.captured import Captured
from pipedream.capture.compute_settings import CPU, keep_freed_memory
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

_PASSES, _FEWEST_PASSES = 8, 3
"""With fewer the gaps between blocks have not come to what they will be."""
_SECONDS = 20.0
"""About how long all passes may take: of large models they are fewer."""
_IN_FLIGHT = 3
_PARTS = 4
_FEWEST_BYTES = 32e6
"""That passes of a part need: where they need less, a few megabytes of other kinds would be taken
for the allocator's."""


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
    """Runs passes of parts of the model on the CPU as a stage runs them, the forward pass of a
    minibatch before the backward pass of the one before it.

    The parts save about the same: blocks of other sizes leave other gaps. A first pass of the whole
    model is not measured, but what libraries keep of it, as part of the baseline. From here on the
    process keeps what it frees, as in training. None if the passes would not fit into memory, or
    the system does not say what a process holds. Buffers are restored.
    """
    nodes = captured.working
    needed = sum(_needed(captured.graph, nodes, kept, _IN_FLIGHT))
    if not resident_bytes() or 2 * needed > free_memory(CPU):
        return None
    values = dict(captured.on_device(inputs, CPU))
    with preserve_model_state(captured), torch.enable_grad():
        begun = monotonic()
        _Passes(captured, nodes, values).run(1, 1)
        affordable = int(_SECONDS / 2 / max(monotonic() - begun, 1e-9))
        passes = max(_FEWEST_PASSES, min(_PASSES, affordable))
        own = sum(tensor.nbytes for tensor in (*captured.module.state_dict().values(), *inputs))
        give_back_freed()
        baseline = max(0, resident_bytes("RssAnon") - own)
        keep_freed_memory()
        gaps = {
            part[0]: _gaps(captured, part, values, kept, passes) for part in _parts(captured, kept)
        }
    return ProfiledProcess(baseline_bytes=baseline, gaps=gaps)


def _parts(captured: Captured, kept: Mapping[str, Footprint]) -> list[list[str]]:
    """Divides the nodes, in their order, into parts of about the same bytes."""
    graph, nodes = captured.graph, captured.working
    sizes = [_IN_FLIGHT * kept[name].saved + graph.nodes[name].parameter_bytes for name in nodes]
    count = max(1, min(_PARTS, int(sum(sizes) / _FEWEST_BYTES)))
    parts: list[list[str]] = [[] for _ in range(count)]
    for name, before, size in zip(nodes, accumulate(sizes, initial=0.0), sizes, strict=False):
        middle = before + size / 2
        parts[min(count - 1, int(count * middle / (sum(sizes) or 1.0)))].append(name)
    return [part for part in parts if part]


def _gaps(
    captured: Captured,
    nodes: Sequence[str],
    values: dict[str, Tensor],
    kept: Mapping[str, Footprint],
    count: int,
) -> tuple[float, float]:
    """Returns what `count` passes of these nodes take more than they need, relative to that: with
    one minibatch in flight, and for each further one. `values` are those of earlier nodes; what
    these nodes give is added.
    """
    passes = _Passes(captured, nodes, values)
    needed, more = [], []
    for in_flight in (1, _IN_FLIGHT):
        needed.append(sum(_needed(captured.graph, nodes, kept, in_flight)))
        with _growth() as growth:
            passes.run(in_flight, count)
        more.append(max(0.0, growth.bytes - needed[-1]))
    values |= passes.outputs()
    if needed[0] < _FEWEST_BYTES / 2:
        return 0.0, 0.0
    first, further = more[0] / needed[0], more[1] - more[0]
    saved = needed[1] - needed[0]
    return first, min(first, max(0.0, further / saved)) if saved else 0.0


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

    def run(self, in_flight: int, passes: int) -> None:
        ends = deque(self._forward() for _ in range(in_flight - 1))
        for _ in range(passes):
            ends.append(self._forward())
            self._backward(ends.popleft())

    @torch.no_grad()
    def outputs(self) -> dict[str, Tensor]:
        """Runs the nodes once more, and returns what they give."""
        return dict(zip(self.part.outputs, self.part.module(*self.given), strict=True))

    def _forward(self) -> list[Tensor]:
        return [each for each in self.part.module(*self.given) if each.requires_grad]

    def _backward(self, ends: Sequence[Tensor]) -> None:
        gradients = [torch.ones_like(end) for end in ends]
        if ends and self.wanted:
            torch.autograd.grad(ends, self.wanted, gradients, allow_unused=True)

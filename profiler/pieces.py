"""Every node of a captured model as a module of its own, to be measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedream.profiler.capture import Captured
from pipedream.profiler.freeze import freeze_constants
from pipedream.profiler.segment import Segment, segment


@dataclass(frozen=True)
class Piece:
    """One node as a module of its own; `gradients` says for each input whether it wants one."""

    node: str
    segment: Segment
    gradients: tuple[bool, ...]
    parameters: tuple[Tensor, ...]

    @property
    def held(self) -> tuple[Tensor, ...]:
        """Parameters and buffers."""
        module = self.segment.module
        return (*module.parameters(), *module.buffers())

    def inputs(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Its inputs as leaves of the autograd graph."""
        return [
            values[name].detach().requires_grad_(wants)
            for name, wants in zip(self.segment.inputs, self.gradients, strict=True)
        ]

    def ends(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What its backward pass begins at, and what it finds gradients of; either may be none."""
        given = [value for value in outputs if value.requires_grad]
        return given, [value for value in inputs if value.requires_grad] + list(self.parameters)


def pieces(captured: Captured, device: torch.device) -> list[Piece]:
    """All nodes but the inputs, in the order of the graph; moves the model to the device."""
    return [_piece(captured, node, device) for node in captured.working]


def _piece(captured: Captured, node: str, device: torch.device) -> Piece:
    part = segment(captured, [node], keep=captured.outputs).to(device)
    freeze_constants(part, captured.owner)
    wants = tuple(captured.values[name].requires_grad for name in part.inputs)
    parameters = tuple(p for p in part.module.parameters() if p.requires_grad)
    return Piece(node, part, wants, parameters)


@contextmanager
def pieces_kept(captured: Captured) -> Iterator[None]:
    """Afterwards the model is on the CPU and its buffers are as they were."""
    kept = {name: buffer.clone() for name, buffer in captured.module.named_buffers()}
    try:
        yield
    finally:
        captured.module.cpu()
        for name, buffer in captured.module.named_buffers():
            buffer.copy_(kept[name])

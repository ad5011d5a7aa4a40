"""A forward pass done once more, exactly as it was, so that what it saves need not wait in memory.

Recomputation as in Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), with a
stage as the segment. What is kept of the first time: the inputs, and the buffers that the stage
writes (batch norm's statistics), which the second time must neither see nor change. Random numbers
come again by themselves (randomness.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipedream.capture.segment import Segment
from pipedream.runtime.stages.compile import Compute


@dataclass(frozen=True)
class Recomputation:
    """What it takes to do the forward pass of one minibatch once more."""

    inputs: tuple[Tensor, ...]
    buffers: Mapping[str, Tensor]

    @staticmethod
    def before(piece: Segment, inputs: tuple[Tensor, ...]) -> Recomputation:
        """To be called right before the forward pass, which is free to write its buffers."""
        buffers = {name: piece.module.get_buffer(name).clone() for name in piece.written_buffers}
        return Recomputation(inputs, buffers)

    def run(self, compute: Compute, tensors: Mapping[str, Tensor]) -> Any:
        """What the forward pass gave on the parameters `tensors`, with its autograd graph."""
        return compute({**tensors, **self.buffers}, self.inputs)

"""Recomputation of a forward pass, exactly as it was, so that its saved tensors need no memory
meanwhile.

As in Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), with a stage as the
segment. Kept are the inputs, and the buffers that the stage writes (batch norm's statistics), which
the second pass must neither see nor change. Random numbers repeat by themselves (randomness.py).
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
    """What the forward pass of one minibatch needs to be repeated."""

    inputs: tuple[Tensor, ...]
    buffers: Mapping[str, Tensor]

    @staticmethod
    def before(piece: Segment, inputs: tuple[Tensor, ...]) -> Recomputation:
        """To be called right before the forward pass, which may then write its buffers."""
        buffers = {name: piece.module.get_buffer(name).clone() for name in piece.written_buffers}
        return Recomputation(inputs, buffers)

    def run(self, compute: Compute, tensors: Mapping[str, Tensor]) -> Any:
        """Returns the results of the forward pass with the parameters `tensors`, with their
        autograd graph.
        """
        return compute({**tensors, **self.buffers}, self.inputs)

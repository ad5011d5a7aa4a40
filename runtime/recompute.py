"""A forward pass done once more, exactly as it was, so that what it saves need not wait in memory.

Recomputation as in Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), with a
stage as the segment. What is kept of the first time: the inputs, the state of the random numbers,
and the buffers that the stage writes (batch norm's statistics), which the second time must neither
see nor change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from pipedream.profiler.segment import Segment


@dataclass(frozen=True)
class Again:
    """What it takes to do the forward pass of one minibatch once more."""

    inputs: tuple[Tensor, ...]
    buffers: Mapping[str, Tensor]
    random: Sequence[tuple[torch.device, Tensor]]

    @staticmethod
    def before(piece: Segment, inputs: tuple[Tensor, ...], device: torch.device) -> Again:
        """To be called right before the forward pass, which is free to write its buffers."""
        states = [(torch.device("cpu"), torch.get_rng_state())]
        if device.type == "cuda":
            states.append((device, torch.cuda.get_rng_state(device)))
        buffers = {name: piece.module.get_buffer(name).clone() for name in piece.written_buffers}
        return Again(inputs, buffers, states)

    def run(self, piece: Segment, tensors: Mapping[str, Tensor]) -> Any:
        """What the forward pass gave on the parameters `tensors`, with its autograd graph."""
        devices = [device for device, _ in self.random if device.type == "cuda"]
        with torch.random.fork_rng(devices):
            for device, state in self.random:
                if device.type == "cuda":
                    torch.cuda.set_rng_state(state, device)
                else:
                    torch.set_rng_state(state)
            return functional_call(piece.module, {**tensors, **self.buffers}, self.inputs)

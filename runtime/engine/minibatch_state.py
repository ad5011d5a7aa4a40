"""What a stage keeps of a minibatch between its passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipedream.capture.segment import Segment
from pipedream.comm.device.copies import copy_all
from pipedream.comm.messages import Message
from pipedream.runtime.engine.passes import Passes
from pipedream.runtime.optim.weights import Version
from pipedream.schedule.channel import Channel


@dataclass
class MinibatchState:
    """What one minibatch leaves in a stage between its forward and its backward pass.

    `received`: values from other stages; `leaving`: those to be sent. `passes`: a forward pass on
    `version`, and what it has left; with `recomputation` it has left nothing, and is repeated.
    `messages`: received activations, whose memory can be recycled; that of gradients cannot,
    because autograd passes on views of it. `gradients`: those received, then those to be sent;
    `sent` is set when the last of them is.
    """

    received: dict[str, torch.Tensor] = field(default_factory=dict)
    leaving: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    version: Version | None = None
    loss: torch.Tensor | None = None
    recomputation: Recomputation | None = None
    passes: Passes | None = None
    sent: bool = False
    messages: list[tuple[Channel, Message]] = field(default_factory=list)


@dataclass(frozen=True)
class Recomputation:
    """What the forward pass of one minibatch needs to be repeated exactly as it was, so that its
    saved tensors need no memory meanwhile.

    As in Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), with a stage as the
    segment. Kept are the inputs, and the buffers that the stage writes (batch norm's statistics),
    which the second pass must neither see nor change. Random numbers repeat: see `MinibatchRng`.
    """

    inputs: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    @staticmethod
    def before(piece: Segment, inputs: Mapping[str, Tensor]) -> Recomputation:
        """To be called right before the forward pass, which may then write its buffers."""
        written = {name: piece.module.get_buffer(name) for name in piece.written_buffers}
        buffers = {name: torch.empty_like(buffer) for name, buffer in written.items()}
        copy_all((buffers[name], buffer) for name, buffer in written.items())
        return Recomputation(inputs, buffers)

    def run(self, passes: Passes, tensors: Mapping[str, Tensor]) -> None:
        """Repeats the forward pass with the parameters `tensors`."""
        passes.forward({**tensors, **self.buffers}, self.inputs)

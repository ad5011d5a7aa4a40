"""What a stage keeps of a minibatch between its passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipedream.capture.segment import Segment
from pipedream.comm.transport import Message
from pipedream.runtime.engine.program_passes import ProgramPasses
from pipedream.runtime.optim.weights import Version
from pipedream.runtime.stages.stage_module import Compute
from pipedream.schedule.channel import Channel


@dataclass
class MinibatchState:
    """What one minibatch leaves in a stage between its forward and its backward pass.

    `received`: values from other stages; `leaving`: those to be sent; `edges`: graph edges, without
    data, of sent values that need a gradient. `recomputation` replaces the graph if the stage
    recomputes. `messages`: received activations, whose memory can be recycled; that of gradients
    cannot, because autograd passes on views of it. `gradients`: those received, then those to be
    sent; `sent` is set when the last of them is. `ends`: where a backward pass under way began.
    `passes` replaces graph, edges and ends if the stage runs as programs.
    """

    received: dict[str, torch.Tensor] = field(default_factory=dict)
    leaving: dict[str, torch.Tensor] = field(default_factory=dict)
    edges: dict[str, GradientEdge] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    version: Version | None = None
    loss: torch.Tensor | None = None
    recomputation: Recomputation | None = None
    ends: BackwardRoots | None = None
    passes: ProgramPasses | None = None
    sent: bool = False
    messages: list[tuple[Channel, Message]] = field(default_factory=list)


@dataclass(frozen=True)
class BackwardRoots:
    """Where a backward pass begins, at the loss or at what was sent, with the gradients there."""

    edges: Sequence[torch.Tensor] | Sequence[GradientEdge]
    gradients: Sequence[torch.Tensor] | None

    @staticmethod
    def of(state: MinibatchState) -> BackwardRoots:
        if state.loss is not None:
            return BackwardRoots([state.loss] if state.loss.requires_grad else [], None)
        names = [name for name in state.gradients if name in state.edges]
        return BackwardRoots([state.edges[n] for n in names], [state.gradients[n] for n in names])

    def propagate(self, to: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
        """Adds to the `grad` of these leaves; with `retain_graph` the graph can be used again."""
        if self.edges and to:
            torch.autograd.backward(
                self.edges, self.gradients, retain_graph=retain_graph, inputs=to
            )


@dataclass(frozen=True)
class Recomputation:
    """What the forward pass of one minibatch needs to be repeated exactly as it was, so that its
    saved tensors need no memory meanwhile.

    As in Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), with a stage as the
    segment. Kept are the inputs, and the buffers that the stage writes (batch norm's statistics),
    which the second pass must neither see nor change. Random numbers repeat: see `MinibatchRng`.
    """

    inputs: tuple[Tensor, ...]
    buffers: Mapping[str, Tensor]

    @staticmethod
    def before(piece: Segment, inputs: tuple[Tensor, ...]) -> Recomputation:
        """To be called right before the forward pass, which may then write its buffers."""
        buffers = {name: piece.module.get_buffer(name).clone() for name in piece.written_buffers}
        return Recomputation(inputs, buffers)

    def run(self, compute: Compute, tensors: Mapping[str, Tensor]) -> Any:
        """Returns what the forward pass gives with the parameters `tensors`, with its graph."""
        return compute({**tensors, **self.buffers}, self.inputs)

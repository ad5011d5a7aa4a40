"""The forward passes and activations of a stage, which training and evaluation have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from pipedream.capture.loss import Loss
from pipedream.comm.transport import PeerLost, Transport
from pipedream.graph.errors import UserError
from pipedream.graph.plan import RankAssignment
from pipedream.runtime.engine.minibatch_state import MinibatchState
from pipedream.runtime.stages.stage_module import StageModule, StageModules
from pipedream.schedule.action import Action, Kind, Worker
from pipedream.schedule.channel import Channel

Table: TypeAlias = Mapping[Kind, Callable[[Action], None]]
"""The method that performs each kind of action."""


class Minibatches(Protocol):
    """The data of an epoch: the input tensors of minibatch b, and its target."""

    def inputs(self, minibatch: int, which: Iterable[int]) -> list[torch.Tensor]: ...

    def target(self, minibatch: int) -> Any: ...


@contextmanager
def computing(action: Action) -> Iterator[None]:
    """Turns what operators of the model raise, such as for want of memory, into UserError."""
    try:
        yield
    except PeerLost:
        raise
    except (RuntimeError, IndexError) as error:
        reason = (str(error).strip() or "no message").splitlines()[0]
        which = "forward" if action.kind is Kind.FORWARD else "backward"
        raise UserError(
            f"stage {action.stage} cannot do the {which} pass of minibatch "
            f"{action.minibatch}: {type(error).__name__}: {reason}"
        ) from error


@dataclass
class ForwardExecutor:
    """One replica of one stage: the base of those that the engine drives.

    `stage_modules` has the stage for each size of minibatch; `loss(output, target)`, of what the
    model returns, is for the last stage.
    """

    stage_modules: StageModules
    transport: Transport
    assignment: RankAssignment
    loss: Loss

    def begin(self, data: Minibatches) -> None:
        """Prepares for a segment, with nothing in flight."""
        self.data = data
        self.states: dict[int, MinibatchState] = {}
        self.channels: dict[tuple[Kind, Worker | None], Channel] = {}

    def follow(self, actions: Sequence[Action], delays: Mapping[int, int]) -> None:
        """Called with all actions of this stage in the segment, those already done included.
        `delays`: by how many updates the weights of each minibatch are to be predicted.
        """

    def end(self) -> None:
        """Called at the end of a segment, when nothing is in flight."""
        assert not self.states

    @property
    def table(self) -> Table:
        raise NotImplementedError

    def is_last(self, action: Action) -> bool:
        """Whether the action is one of the last stage, which has the loss."""
        return action.stage == len(self.assignment) - 1

    def post(self, action: Action) -> None:
        """Posts a receive that is still to come, with buffers for its tensors."""
        assert action.peer is not None
        layout = self.stage_modules.of(action.minibatch).layout
        if action.kind is Kind.RECV_ACTIVATION:
            values = layout.receives[action.peer[0]]
        else:
            sent = layout.sends[action.peer[0]]
            values = tuple(value for value in sent if value.requires_grad)
        self.transport.post(self._channel(action), values)

    def _channel(self, action: Action) -> Channel:
        key = action.kind, action.peer
        channel = self.channels.get(key)
        if channel is None:
            channel = self.channels[key] = Channel.of(action, self.assignment)
        return channel

    def _receive_activation(self, action: Action) -> None:
        assert action.peer is not None
        state = self.states.setdefault(action.minibatch, MinibatchState())
        channel = self._channel(action)
        tensors = self.transport.receive(channel)
        values = self.stage_modules.of(action.minibatch).layout.receives[action.peer[0]]
        state.messages.append((channel, tensors))
        for value, tensor in zip(values, tensors, strict=True):
            state.received[value.name] = tensor.requires_grad_(value.requires_grad)

    def _read(self, action: Action, state: MinibatchState) -> dict[str, torch.Tensor]:
        """All values that the forward pass of a minibatch may need, by name."""
        reads = self.stage_modules.of(action.minibatch).layout.reads
        inputs = self.data.inputs(action.minibatch, reads.values())
        return {**state.received, **dict(zip(reads, inputs, strict=True))}

    def _compute(
        self,
        action: Action,
        stage_module: StageModule,
        tensors: Mapping[str, torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
    ) -> dict[str, torch.Tensor]:
        """The values that the forward pass makes, by name."""
        with computing(action):
            results = stage_module.compute(tensors, inputs)
        return dict(zip(stage_module.piece.outputs, results, strict=True))

    def _send_activation(self, action: Action) -> None:
        assert action.peer is not None
        state = self.states[action.minibatch]
        sends = self.stage_modules.of(action.minibatch).layout.sends
        message = [state.leaving[value.name] for value in sends[action.peer[0]]]
        self.transport.send(self._channel(action), message)
        if action.peer[0] == max(sends):
            self._activations_sent(action.minibatch, state)

    def _activations_sent(self, minibatch: int, state: MinibatchState) -> None:
        """Called when the last activation of a minibatch is on its way."""
        state.leaving = {}

    def _recycle(self, state: MinibatchState) -> None:
        """Gives the memory of received activations to later messages."""
        for channel, message in state.messages:
            self.transport.recycle(channel, message)
        state.messages = []


def apart(tensor: torch.Tensor, received: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns a value to be sent, in memory that no later message is received into."""
    memory = tensor.untyped_storage().data_ptr()
    shared = any(other.untyped_storage().data_ptr() == memory for other in received.values())
    return tensor.detach().clone() if shared else tensor.detach()

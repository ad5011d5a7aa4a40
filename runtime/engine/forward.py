"""The forward passes and activations of a stage, which training and evaluation have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from pipedream.capture.loss import Loss
from pipedream.capture.segment import Segment
from pipedream.comm.redistribute import cut, paste
from pipedream.comm.transport import Message, PeerLost, Transport
from pipedream.graph.errors import UserError
from pipedream.graph.plan import RankAssignment
from pipedream.runtime.data.reader import Batch
from pipedream.runtime.engine.device_messages import DeviceMessages
from pipedream.runtime.engine.minibatch_state import MinibatchState
from pipedream.runtime.stages.partition import StageInterface
from pipedream.runtime.stages.stage_module import ModuleChoice, StageModule
from pipedream.runtime.stages.stage_sharding import StageSharding
from pipedream.schedule.action import Action, Kind, Worker
from pipedream.schedule.channel import Channel

Table: TypeAlias = Mapping[Kind, Callable[[Action], None]]
"""The method that performs each kind of action."""


class Minibatches(Protocol):
    """The data of an epoch: the input tensors of minibatch b, and its target."""

    def inputs(self, minibatch: int, which: Iterable[int]) -> list[Tensor]: ...

    def target(self, minibatch: int) -> Any: ...

    def peek(self, minibatch: int) -> Batch:
        """One whose turn is still to come."""


@contextmanager
def computing(action: Action) -> Iterator[None]:
    """Turns errors of the model's operators, such as running out of memory, into UserError."""
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
class ForwardExecutor(ABC):
    """One replica of one stage: the base of those that the engine drives.

    `stage_modules` has the stage for each minibatch; `loss(output, target)`, of what the
    model returns, is for the last stage. `sharding`: if this is one device of a mesh; all of them
    perform the same actions.
    """

    stage_modules: ModuleChoice
    transport: Transport
    assignment: RankAssignment
    loss: Loss
    sharding: StageSharding | None = field(default=None, kw_only=True)

    def begin(self, data: Minibatches) -> None:
        """Prepares for a segment, with nothing in flight."""
        self.data = data
        self.stage_modules.begin(data)
        self.states: dict[int, MinibatchState] = {}
        self.messages: dict[tuple[Kind, Worker | None, int], DeviceMessages] = {}
        self.channels: dict[tuple[Kind, Worker | None, int], Channel] = {}

    def follow(self, actions: Sequence[Action], delays: Mapping[int, int]) -> None:
        """Called with all actions of this stage in the segment, those already done included.

        `delays`: by how many updates the weights of each minibatch are to be predicted.
        """
        self.delays = delays

    def end(self) -> None:
        """Called at the end of a segment, when nothing is in flight."""
        assert not self.states

    @property
    def table(self) -> Table:
        return {
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.FORWARD: self._forward,
            Kind.SEND_ACTIVATION: self._send_activation,
        }

    def post(self, action: Action) -> None:
        """Posts a receive that is still to come, with buffers for its tensors."""
        messages = self._messages(action)
        for other in messages.parts:
            self.transport.post(self._channel(action, other), messages.types(other))

    @property
    def last_stage(self) -> int:
        return len(self.assignment) - 1

    @property
    def mesh_device(self) -> int:
        """Which one of the stage's mesh this is."""
        return 0 if self.sharding is None else self.sharding.device

    def _messages(self, action: Action) -> DeviceMessages:
        """What this device sends or receives."""
        stage_module = self.stage_modules.of(action.minibatch)
        key = action.kind, action.peer, id(stage_module)
        messages = self.messages.get(key)
        if messages is None:
            assert action.peer is not None
            counts = [
                len(self.assignment[stage][replica].ranks)
                for stage, replica in ((action.stage, action.replica), action.peer)
            ]
            crossings = stage_module.crossings
            messages = DeviceMessages.of(action, crossings, self.mesh_device, *counts)
            self.messages[key] = messages
        return messages

    def _channel(self, action: Action, other: int) -> Channel:
        """To or from this device of the other worker."""
        key = action.kind, action.peer, other
        channel = self.channels.get(key)
        if channel is None:
            channel = Channel.of(action, self.assignment, self.mesh_device, other)
            self.channels[key] = channel
        return channel

    def _send(self, action: Action, values: Sequence[Tensor]) -> None:
        messages = self._messages(action)
        for other, parts in messages.parts.items():
            pieces = [
                cut(values[part.number], messages.held[part.number], part.region) for part in parts
            ]
            self.transport.send(self._channel(action, other), pieces)

    def _receive(self, action: Action) -> tuple[Sequence[Tensor], list[tuple[Channel, Message]]]:
        """The values as this device holds them, and the messages that they are in memory of."""
        messages = self._messages(action)
        arrived = [
            (channel, parts, self.transport.receive(channel))
            for other, parts in messages.parts.items()
            for channel in [self._channel(action, other)]
        ]
        if messages.is_direct:
            ((channel, _, tensors),) = arrived
            return tensors, [(channel, tensors)]
        values = [
            torch.empty(held.shape, dtype=crossing.value.dtype, device=self.transport.device)
            for crossing, held in zip(messages.crossings, messages.held, strict=True)
        ]
        for channel, parts, tensors in arrived:
            for (number, region), tensor in zip(parts, tensors, strict=True):
                paste(values[number], messages.held[number], [(region, tensor)])
            self.transport.recycle(channel, tensors)
        self._gather(values, messages)
        return values, []

    def _gather(self, values: Sequence[Tensor], messages: DeviceMessages) -> None:
        for value, held, gathers in zip(values, messages.held, messages.gathers, strict=True):
            if gathers:
                assert self.sharding is not None
                assert self.sharding.groups is not None
                self.sharding.groups.gather(value, held, gathers)

    def _receive_activation(self, action: Action) -> None:
        assert action.peer is not None
        state = self.states.setdefault(action.minibatch, MinibatchState())
        values = self.stage_modules.of(action.minibatch).interface.receives[action.peer[0]]
        tensors, messages = self._receive(action)
        state.messages += messages
        for value, tensor in zip(values, tensors, strict=True):
            state.received[value.name] = tensor.requires_grad_(value.requires_grad)

    def _forward(self, action: Action) -> None:
        state = self.states.setdefault(action.minibatch, MinibatchState())
        stage_module = self.stage_modules.of(action.minibatch)
        interface, segment = stage_module.interface, stage_module.piece
        read = self.data.inputs(action.minibatch, interface.reads.values())
        known = {**state.received, **dict(zip(interface.reads, read, strict=True))}
        inputs = tuple(known[name] for name in segment.inputs)
        tensors = self._prepare(action, state, segment, inputs)
        with computing(action):
            values = self._compute(action, state, stage_module, tensors, known)
        if action.stage == self.last_stage:
            self._take_outputs(action, state, stage_module, {**known, **values})
        state.leaving = {name: apart(values[name], state.received) for name in interface.sent}
        self._after_forward(action, state, interface, values)

    @abstractmethod
    def _prepare(
        self, action: Action, state: MinibatchState, segment: Segment, inputs: tuple[Tensor, ...]
    ) -> Mapping[str, Tensor]:
        """Called before a forward pass; returns its parameters and buffers by name."""

    @abstractmethod
    def _compute(
        self,
        action: Action,
        state: MinibatchState,
        stage_module: StageModule,
        tensors: Mapping[str, Tensor],
        known: Mapping[str, Tensor],
    ) -> Mapping[str, Tensor]:
        """Returns the outputs of the stage, of what it received or read, by name."""

    @abstractmethod
    def _take_outputs(
        self,
        action: Action,
        state: MinibatchState,
        stage_module: StageModule,
        known: Mapping[str, Tensor],
    ) -> None:
        """Called in the last stage, with what it received, read and computed."""

    @abstractmethod
    def _after_forward(
        self,
        action: Action,
        state: MinibatchState,
        interface: StageInterface,
        values: Mapping[str, Tensor],
    ) -> None:
        """Called with all that a forward pass has computed; some of it is `leaving`."""

    def _send_activation(self, action: Action) -> None:
        assert action.peer is not None
        state = self.states[action.minibatch]
        sends = self.stage_modules.of(action.minibatch).interface.sends
        message = [state.leaving[value.name] for value in sends[action.peer[0]]]
        self._send(action, message)
        if action.peer[0] == max(sends):
            self._activations_sent(action.minibatch, state)

    def _activations_sent(self, minibatch: int, state: MinibatchState) -> None:
        """Called when the last activation of a minibatch is on its way."""
        state.leaving = {}

    def _recycle(
        self, state: MinibatchState, needed: Callable[[Tensor], bool] = lambda tensor: False
    ) -> None:
        """Gives the memory of received activations to later messages, except what is `needed`."""
        left = []
        for channel, message in state.messages:
            if any(needed(tensor) for tensor in message):
                left.append((channel, message))
            else:
                self.transport.recycle(channel, message)
        state.messages = left


def apart(tensor: Tensor, received: Mapping[str, Tensor]) -> Tensor:
    """Returns a value to be sent, in memory that no later message is received into."""
    memory = tensor.untyped_storage().data_ptr()
    shared = any(other.untyped_storage().data_ptr() == memory for other in received.values())
    return tensor.detach().clone() if shared else tensor.detach()

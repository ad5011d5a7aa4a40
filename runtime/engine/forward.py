"""The forward passes and activations of a stage, which training and evaluation have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from pipedream.capture.loss import Loss
from pipedream.comm.buckets import Buckets
from pipedream.comm.messages import PeerLost
from pipedream.comm.transport import Transport
from pipedream.graph.errors import UserError
from pipedream.graph.plan import RankAssignment
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.engine.minibatch_state import MinibatchState
from pipedream.runtime.engine.value_exchange import ValueExchange
from pipedream.runtime.run.action_stream import Lateness
from pipedream.runtime.stages.partition import StageInterface
from pipedream.runtime.stages.sharded_stage import ShardedStage
from pipedream.runtime.stages.stage_forms import StageForms
from pipedream.runtime.stages.stage_module import StageModule
from pipedream.schedule.action import Action, Kind

Tensors: TypeAlias = Mapping[str, Tensor]
"""By the names of values, or of parameters and buffers."""

Table: TypeAlias = Mapping[Kind, Callable[[Action], None]]
"""The method that performs each kind of action."""


class Minibatches(Protocol):
    """The data of an epoch: the input tensors of minibatch b, and its target."""

    def inputs(self, minibatch: int, which: Iterable[int]) -> list[Tensor]: ...

    def target(self, minibatch: int) -> Any: ...

    def peek(self, minibatch: int) -> Batch:
        """Returns one whose turn is still to come."""


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

    stage_modules: StageForms
    transport: Transport
    assignment: RankAssignment
    loss: Loss
    sharding: ShardedStage | None = field(default=None, kw_only=True)

    def begin(self, data: Minibatches) -> None:
        """Prepares for a segment, with nothing in flight."""
        self.data = data
        self.stage_modules.begin(data)
        self.states: dict[int, MinibatchState] = {}
        mesh = (0, None) if self.sharding is None else (self.sharding.device, self.sharding.groups)
        self.exchange = ValueExchange(self.transport, self.assignment, *mesh)

    def follow(self, actions: Sequence[Action], lateness: Lateness) -> None:
        """Called with all actions of this stage in the segment, those already done included."""
        self.lateness = lateness

    def end(self) -> None:
        """Called at the end of a segment, when nothing is in flight."""
        assert not self.states

    @property
    def buckets(self) -> Sequence[Buckets]:
        """Returns the sums of its gradients."""
        return ()

    @property
    def table(self) -> Table:
        return {
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.FORWARD: self._forward,
            Kind.SEND_ACTIVATION: self._send_activation,
        }

    def post(self, action: Action) -> None:
        """Posts a receive that is still to come, with buffers for its tensors."""
        self.exchange.post(action, self.stage_modules.of(action.minibatch).crossings)

    @property
    def last_stage(self) -> int:
        return len(self.assignment) - 1

    def _send(self, action: Action, values: Sequence[Tensor]) -> None:
        self.exchange.send(action, self.stage_modules.of(action.minibatch).crossings, values)

    def _receive_activation(self, action: Action) -> None:
        assert action.peer is not None
        state = self.states.setdefault(action.minibatch, MinibatchState())
        stage_module = self.stage_modules.of(action.minibatch)
        values = stage_module.interface.receives[action.peer[0]]
        tensors, messages = self.exchange.receive(action, stage_module.crossings)
        state.messages += messages
        for value, tensor in zip(values, tensors, strict=True):
            state.received[value.name] = tensor.requires_grad_(value.requires_grad)

    def _forward(self, action: Action) -> None:
        state = self.states.setdefault(action.minibatch, MinibatchState())
        stage_module = self.stage_modules.of(action.minibatch)
        interface = stage_module.interface
        read = self.data.inputs(action.minibatch, interface.reads.values())
        known = {**state.received, **dict(zip(interface.reads, read, strict=True))}
        values = self._compute(action, state, stage_module, known)
        if action.stage == self.last_stage:
            self._take_outputs(action, state, stage_module, {**known, **values})
        state.leaving = {name: apart(values[name], state.received) for name in interface.sent}
        self._after_forward(action, state, interface, values)

    @abstractmethod
    def _compute(
        self, action: Action, state: MinibatchState, stage_module: StageModule, known: Tensors
    ) -> Tensors:
        """Returns the outputs of the stage, of what it received or read, by name."""

    @abstractmethod
    def _take_outputs(
        self, action: Action, state: MinibatchState, stage_module: StageModule, known: Tensors
    ) -> None:
        """Called in the last stage, with what it received, read and computed."""

    @abstractmethod
    def _after_forward(
        self, action: Action, state: MinibatchState, interface: StageInterface, values: Tensors
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


def apart(tensor: Tensor, received: Tensors) -> Tensor:
    """Returns a value to be sent, in memory that no later message is received into."""
    memory = tensor.untyped_storage().data_ptr()
    shared = any(other.untyped_storage().data_ptr() == memory for other in received.values())
    return tensor.detach().clone() if shared else tensor.detach()

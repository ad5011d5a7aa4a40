"""What one replica of one stage does: one small method for each kind of action, found through one
table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipedream.comm.buckets import Buckets
from pipedream.comm.process_groups import Groups
from pipedream.comm.transport import Message, PeerLost, Transport
from pipedream.graph.errors import UserError
from pipedream.runtime.engine.randomness import MinibatchRng
from pipedream.runtime.engine.recompute import Recomputation
from pipedream.runtime.engine.weights import Version, Weights
from pipedream.runtime.optim.stepping import Stepping
from pipedream.runtime.stages.stage_module import StageModule, StageModules
from pipedream.schedule.action import ENDS_BACKWARD, Action, Kind, Worker
from pipedream.schedule.channel import Channel
from pipedream.schedule.versions import uses

Table: TypeAlias = Mapping[Kind, Callable[[Action], None]]


class Minibatches(Protocol):
    """The data of an epoch: the input tensors of minibatch b, and its target."""

    def inputs(self, minibatch: int, which: Iterable[int]) -> list[torch.Tensor]: ...

    def target(self, minibatch: int) -> Any: ...


@contextmanager
def _computing(action: Action) -> Iterator[None]:
    """What the model's operators cannot do, for its data or for want of memory, the user mends."""
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
class MinibatchState:
    """What one minibatch leaves in this stage between its forward and its backward pass.

    `received`: values from other stages; `leaving`: those to be sent; `edges`: where the backward
    pass may begin, the values that need a gradient, without their data. `recomputation` replaces
    the autograd graph where the stage recomputes. `messages`: those with activations, whose
    memory may then go round. That of gradients may not: autograd hands on views of it as the
    gradients of others. `gradients` are those received, then those to be sent; all `sent`: the
    last of them has been. Between the halves of the backward pass `ends` is where it begins.
    """

    received: dict[str, torch.Tensor] = field(default_factory=dict)
    leaving: dict[str, torch.Tensor] = field(default_factory=dict)
    edges: dict[str, GradientEdge] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    version: Version | None = None
    loss: torch.Tensor | None = None
    recomputation: Recomputation | None = None
    ends: BackwardRoots | None = None
    sent: bool = False
    messages: list[tuple[Channel, Message]] = field(default_factory=list)


@dataclass(frozen=True)
class BackwardRoots:
    """Where a backward pass begins, at the loss or at what was sent, and with which gradients."""

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


@dataclass
class Executor:
    """One replica of one stage.

    `stage_modules` has the stage for each size of minibatch. `ranks[stage][replica]` is the rank of
    a worker; `loss(output, target)`, of what the model returns, is for the last stage; `on_loss`
    hears of it. `rng` give the pass of a minibatch its random numbers. With `recompute` the
    backward pass does the forward pass again: not in the last stage, whose backward pass follows at
    once. `per_update` minibatches of a round count as one update to the scheduler of the learning
    rate.

    A backward pass in two halves goes through the autograd graph twice: from the loss, or what was
    sent, to what was received, then once more and on to the parameters. Next to a whole one the
    gradients from operator to operator are found twice; all that was saved stays until the second.
    """

    stage_modules: StageModules
    weights: Weights
    stepping: Stepping
    transport: Transport
    groups: Groups
    ranks: Sequence[Sequence[int]]
    loss: Callable[[Any, Any], torch.Tensor]
    on_loss: Callable[[int, torch.Tensor], None]
    rng: MinibatchRng
    per_update: int = 1
    recompute: bool = False

    def begin(self, data: Minibatches) -> None:
        """Makes ready for a segment; nothing is in flight."""
        self.data = data
        self.state: dict[int, MinibatchState] = {}
        self.channels: dict[tuple[Kind, Worker | None], Channel] = {}
        self.base = self.weights.current.number
        self.weights.begin()

    def follow(self, actions: Sequence[Action], delays: Mapping[int, int]) -> None:
        """`actions` are all that this stage does in the segment, those that have been done among
        them; `delays`: by how many updates the weights of a minibatch are to be predicted.
        """
        self.delays = delays
        used = uses(action for action in actions if not delays.get(action.minibatch))
        self.weights.expect({self.base + version: count for version, count in used.items()})
        self.closing = _closing(actions)

    def end(self) -> None:
        """All that was begun is done."""
        assert not self.state
        assert not self.weights.older

    @property
    def table(self) -> Table:
        """What does the actions of each kind."""
        return {
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.FORWARD: self._forward,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECV_GRADIENT: self._receive_gradient,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.ALL_REDUCE: self._all_reduce,
            Kind.UPDATE: self._update,
        }

    def _channel(self, action: Action) -> Channel:
        key = action.kind, action.peer
        channel = self.channels.get(key)
        if channel is None:
            channel = self.channels[key] = Channel.of(action, self.ranks)
        return channel

    def post(self, action: Action) -> None:
        """Makes room for what a receive that is still to come will bring."""
        assert action.peer is not None
        layout = self.stage_modules.of(action.minibatch).layout
        if action.kind is Kind.RECV_ACTIVATION:
            values = layout.receives[action.peer[0]]
        else:
            sent = layout.sends[action.peer[0]]
            values = tuple(value for value in sent if value.requires_grad)
        self.transport.post(self._channel(action), values)

    def _receive_activation(self, action: Action) -> None:
        assert action.peer is not None
        state = self.state.setdefault(action.minibatch, MinibatchState())
        channel = self._channel(action)
        tensors = self.transport.receive(channel)
        values = self.stage_modules.of(action.minibatch).layout.receives[action.peer[0]]
        state.messages.append((channel, tensors))
        for value, tensor in zip(values, tensors, strict=True):
            state.received[value.name] = tensor.requires_grad_(value.requires_grad)

    def _forward(self, action: Action) -> None:
        state = self.state.setdefault(action.minibatch, MinibatchState())
        stage_module = self.stage_modules.of(action.minibatch)
        reads = stage_module.layout.reads
        given = self.data.inputs(action.minibatch, reads.values())
        known = {**state.received, **dict(zip(reads, given, strict=True))}
        inputs = tuple(known[name] for name in stage_module.piece.inputs)
        state.version = self.weights.acquire(
            self.base + action.version, self.delays.get(action.minibatch, 0)
        )
        self.rng.minibatch = action.minibatch
        if self.recompute:
            state.recomputation = Recomputation.before(stage_module.piece, inputs)
        with _computing(action):
            results = stage_module.compute(state.version.tensors, inputs)
        made = dict(zip(stage_module.piece.outputs, results, strict=True))
        _keep_edges(state, stage_module, made)
        if action.stage == len(self.ranks) - 1:
            known |= made
            loss = self.loss(stage_module.output(known), self.data.target(action.minibatch))
            self.on_loss(action.minibatch, loss.detach())
            scale = self.stepping.scale.value
            state.loss = loss if scale == 1.0 else loss * scale
        layout, received = stage_module.layout, state.received
        state.leaving = {name: _apart(made[name], received) for name in layout.sent}
        state.received = {name: received[name] for name in layout.received_for_gradient}

    def _send_activation(self, action: Action) -> None:
        assert action.peer is not None
        state = self.state[action.minibatch]
        sends = self.stage_modules.of(action.minibatch).layout.sends
        message = [state.leaving[value.name] for value in sends[action.peer[0]]]
        self.transport.send(self._channel(action), message)
        if action.peer[0] == max(sends):
            state.leaving = {}

    def _receive_gradient(self, action: Action) -> None:
        assert action.peer is not None
        gradients = self.state[action.minibatch].gradients
        sends = self.stage_modules.of(action.minibatch).layout.sends
        sent = [value for value in sends[action.peer[0]] if value.requires_grad]
        tensors = self.transport.receive(self._channel(action))
        for value, tensor in zip(sent, tensors, strict=True):
            known = gradients.get(value.name)
            gradients[value.name] = tensor if known is None else known + tensor

    def _backward(self, action: Action) -> None:
        state = self._turn(action)
        assert state.ends is not None
        received = state.received.values()
        with self._learning(action, state) as parameters:
            state.ends.propagate([*parameters, *received])
        _keep_gradients(state)
        self._let_go(action.minibatch, state)

    def _backward_input(self, action: Action) -> None:
        """The first half: finds the gradients of what was received, which may then be sent."""
        state = self._turn(action)
        assert state.ends is not None
        with _computing(action):
            state.ends.propagate(list(state.received.values()), retain_graph=True)
        _keep_gradients(state)

    def _backward_weight(self, action: Action) -> None:
        """The second half: those of the parameters go to the round."""
        state = self.state[action.minibatch]
        assert state.ends is not None
        with self._learning(action, state) as parameters:
            state.ends.propagate(parameters)
        self._let_go(action.minibatch, state)

    def _turn(self, action: Action) -> MinibatchState:
        """The minibatch as its backward pass begins: with its autograd graph, and the ends of it.

        It holds no gradients then: those that came are with the ends, those to be sent to be found.
        """
        state, stage_module = self.state[action.minibatch], self.stage_modules.of(action.minibatch)
        assert state.version is not None
        if state.recomputation is not None:
            self.rng.minibatch = action.minibatch
            with _computing(action):
                results = state.recomputation.run(stage_module.compute, state.version.tensors)
            state.recomputation = None
            _keep_edges(
                state, stage_module, dict(zip(stage_module.piece.outputs, results, strict=True))
            )
        state.ends = BackwardRoots.of(state)
        state.gradients, state.edges, state.loss = {}, {}, None
        state.sent = not stage_module.layout.receives
        return state

    @contextmanager
    def _learning(self, action: Action, state: MinibatchState) -> Iterator[list[torch.Tensor]]:
        """What is found for these parameters in here is added to the gradients of the round."""
        version = state.version
        assert version is not None
        with (
            _computing(action),
            self.weights.accumulating(version),
            self._adding_up(action, version),
        ):
            yield [tensor for tensor in version.tensors.values() if tensor.requires_grad]

    def _let_go(self, minibatch: int, state: MinibatchState) -> None:
        """The backward pass is over: of the minibatch there is nothing left but what is to be sent.

        The memory of what was received may go round now that no graph needs it.
        """
        version = state.version
        assert version is not None
        state.received, state.ends, state.version = {}, None, None
        for channel, message in state.messages:
            self.transport.recycle(channel, message)
        state.messages = []
        self.weights.release(version)
        if state.sent:
            del self.state[minibatch]

    def _send_gradient(self, action: Action) -> None:
        assert action.peer is not None
        state = self.state[action.minibatch]
        receives = self.stage_modules.of(action.minibatch).layout.receives
        values = receives[action.peer[0]]
        message = [state.gradients.pop(value.name) for value in values if value.requires_grad]
        self.transport.send(self._channel(action), message)
        if action.peer[0] == max(receives):
            state.sent = True
            if state.version is None:
                del self.state[action.minibatch]

    def _adding_up(self, action: Action, version: Version) -> AbstractContextManager[None]:
        """The sums over the replicas begin in the last backward pass of the round."""
        if self.buckets is None or action.minibatch not in self.closing:
            return nullcontext()
        return self.buckets.filling(version.tensors)

    def _all_reduce(self, action: Action) -> None:
        """Adds the round's gradients up over the replicas; of tied weights, over all holders."""
        gradients = self.weights.gradients
        if self.buckets is not None:
            self.buckets.finish(gradients)
        for name, group in self.groups.tied.items():
            if name not in gradients:
                gradients[name] = torch.zeros_like(self.weights.parameters[name])
            self.transport.add_up([gradients[name]], group)

    @cached_property
    def buckets(self) -> Buckets | None:
        """None for a stage of one replica, or with nothing to learn."""
        own = {
            name: parameter
            for name, parameter in self.weights.parameters.items()
            if parameter.requires_grad and name not in self.groups.tied
        }
        if self.groups.stage is None or not own:
            return None
        return Buckets(own, self.transport, self.groups.stage)

    def _update(self, action: Action) -> None:
        updates = -(-action.divisor // self.per_update)
        self.weights.update(lambda: self.stepping.step(updates), action.divisor)
        assert self.weights.current.number == self.base + action.version


def _closing(actions: Sequence[Action]) -> set[int]:
    """The minibatches whose backward pass is the last one of this worker before an all-reduce."""
    found, last = set(), None
    for action in actions:
        if action.kind in ENDS_BACKWARD:
            last = action.minibatch
        elif action.kind is Kind.ALL_REDUCE and last is not None:
            found.add(last)
            last = None
    return found


def _keep_edges(
    state: MinibatchState, stage_module: StageModule, made: Mapping[str, torch.Tensor]
) -> None:
    """Of what is sent the autograd graph needs the edges; the data may go once it is sent."""
    if state.recomputation is None:
        needed = {name: made[name] for name in stage_module.layout.sent if made[name].requires_grad}
        state.edges = {name: get_gradient_edge(tensor) for name, tensor in needed.items()}


def _keep_gradients(state: MinibatchState) -> None:
    """Those of what was received are to be sent; what plays no part in the loss has zeros."""
    for name, tensor in state.received.items():
        state.gradients[name] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _apart(tensor: torch.Tensor, received: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A value to be sent, in memory that no later message will be received in."""
    memory = tensor.untyped_storage().data_ptr()
    shared = any(other.untyped_storage().data_ptr() == memory for other in received.values())
    return tensor.detach().clone() if shared else tensor.detach()

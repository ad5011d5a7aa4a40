"""Executes the actions of one rank: one small method for each kind, found through one table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipedream.graph.command import UserError
from pipedream.graph.timeline import Event
from pipedream.runtime.action import Action, Kind, Worker
from pipedream.runtime.buckets import Buckets
from pipedream.runtime.course import Course
from pipedream.runtime.form import Form, Forms
from pipedream.runtime.randomness import Dice
from pipedream.runtime.recompute import Again
from pipedream.runtime.stepping import Stepping
from pipedream.runtime.transport import Channel, Message, PeerLost, Transport
from pipedream.runtime.versions import uses
from pipedream.runtime.weights import Version, Weights

LOOK_AHEAD = 16
"""How many actions ahead the receives are posted."""

RECEIVES = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)


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
        raise UserError(
            f"stage {action.stage} cannot do the {action.kind.name.lower()} pass of minibatch "
            f"{action.minibatch}: {type(error).__name__}: {reason}"
        ) from error


@dataclass
class Passing:
    """What one minibatch leaves on this rank between its forward and its backward pass.

    `received`: values from other stages; `leaving`: those to be sent; `ends`: where the backward
    pass may begin, the values that need a gradient, without their data. `again` takes the place of
    the autograd graph where the stage recomputes. `messages`: those with activations, whose
    memory may then go round. That of gradients may not: autograd hands on views of it as the
    gradients of others.
    """

    received: dict[str, torch.Tensor] = field(default_factory=dict)
    leaving: dict[str, torch.Tensor] = field(default_factory=dict)
    ends: dict[str, GradientEdge] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    version: Version | None = None
    loss: torch.Tensor | None = None
    again: Again | None = None
    messages: list[tuple[Channel, Message]] = field(default_factory=list)


@dataclass(frozen=True)
class Groups:
    """Who adds gradients up with whom: the replicas of the stage, and the holders of tied weights.

    `stage` is None where the stage has one replica.
    """

    stage: dist.ProcessGroup | None
    tied: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)


@dataclass
class Engine:
    """One replica of one stage.

    `forms` has the stage for the size of each minibatch. `ranks[stage][replica]` is the rank of a
    worker; `loss(output, target)`, of what the model returns, is for the last stage; `on_loss`
    hears of it, `before` and `after` of every action. `dice` give the pass of a minibatch its
    random numbers. With `recompute` the backward pass does the forward pass again: not in the last
    stage, whose backward pass follows at once. `per_update` minibatches of a round count as one
    update to the scheduler of the learning rate.
    """

    forms: Forms
    weights: Weights
    stepping: Stepping
    transport: Transport
    groups: Groups
    ranks: Sequence[Sequence[int]]
    loss: Callable[[Any, Any], torch.Tensor]
    on_loss: Callable[[int, torch.Tensor], None]
    after: Callable[[Action], None]
    dice: Dice
    per_update: int = 1
    recompute: bool = False
    before: Callable[[Action], None] = lambda action: None
    events: list[Event] = field(default_factory=list)

    def run(self, course: Course, data: Minibatches) -> None:
        """Performs one leg. Raises PeerLost, naming the action that could not be done."""
        self.data = data
        self.passing: dict[int, Passing] = {}
        self.base = self.weights.current.number
        self.weights.begin()
        self._follow(course)
        perform = self.table
        position = posted = 0
        while (settled := course.settle(position, LOOK_AHEAD)) > position:
            if course.actions is not self.actions:
                self._follow(course)
            for action in self.actions[posted:settled]:
                self._post(action)
            action, position, posted = self.actions[position], position + 1, settled
            begin = time.perf_counter()
            self.before(action)
            try:
                perform[action.kind](action)
            except PeerLost as error:
                where = f"at {action}, minibatch {action.minibatch}"
                raise PeerLost(f"{error} ({where})", error.peer) from error
            self.events.append(Event(action, begin, time.perf_counter()))
            self.after(action)
        self.transport.drain()
        assert not self.passing
        assert not self.weights.older

    def _follow(self, course: Course) -> None:
        """Its actions are the ones to do now; of another course the same ones have been done."""
        self.actions, self.delays = course.actions, course.delays
        used = uses(action for action in self.actions if not self.delays.get(action.minibatch))
        self.weights.expect({self.base + version: count for version, count in used.items()})
        self.closing = _closing(self.actions)

    @property
    def table(self) -> Mapping[Kind, Callable[[Action], None]]:
        return {
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.FORWARD: self._forward,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECV_GRADIENT: self._receive_gradient,
            Kind.BACKWARD: self._backward,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.ALL_REDUCE: self._all_reduce,
            Kind.UPDATE: self._update,
        }

    def _rank(self, worker: Worker | None) -> int:
        assert worker is not None
        return self.ranks[worker[0]][worker[1]]

    def _channel(self, action: Action) -> Channel:
        gradient = action.kind in (Kind.RECV_GRADIENT, Kind.SEND_GRADIENT)
        return Channel(self._rank(action.peer), gradient)

    def _post(self, action: Action) -> None:
        assert action.kind not in RECEIVES or action.peer is not None
        layout = self.forms.of(action.minibatch).layout
        if action.kind is Kind.RECV_ACTIVATION and action.peer:
            values = layout.receives[action.peer[0]]
            self.transport.post(self._channel(action), values)
        elif action.kind is Kind.RECV_GRADIENT and action.peer:
            sent = layout.sends[action.peer[0]]
            values = tuple(value for value in sent if value.requires_grad)
            self.transport.post(self._channel(action), values)

    def _receive_activation(self, action: Action) -> None:
        assert action.peer is not None
        passing = self.passing.setdefault(action.minibatch, Passing())
        tensors = self.transport.receive(self._channel(action))
        values = self.forms.of(action.minibatch).layout.receives[action.peer[0]]
        passing.messages.append((self._channel(action), tensors))
        for value, tensor in zip(values, tensors, strict=True):
            passing.received[value.name] = tensor.requires_grad_(value.requires_grad)

    def _forward(self, action: Action) -> None:
        passing = self.passing.setdefault(action.minibatch, Passing())
        form = self.forms.of(action.minibatch)
        reads = form.layout.reads
        given = self.data.inputs(action.minibatch, reads.values())
        known = {**passing.received, **dict(zip(reads, given, strict=True))}
        inputs = tuple(known[name] for name in form.piece.inputs)
        passing.version = self.weights.acquire(
            self.base + action.version, self.delays.get(action.minibatch, 0)
        )
        self.dice.minibatch = action.minibatch
        if self.recompute:
            passing.again = Again.before(form.piece, inputs)
        with _computing(action):
            results = form.compute(passing.version.tensors, inputs)
        made = dict(zip(form.piece.outputs, results, strict=True))
        _keep_ends(passing, form, made)
        if action.stage == len(self.ranks) - 1:
            known |= made
            loss = self.loss(form.output(known), self.data.target(action.minibatch))
            self.on_loss(action.minibatch, loss.detach())
            scale = self.stepping.scale.value
            passing.loss = loss if scale == 1.0 else loss * scale
        layout, received = form.layout, passing.received
        passing.leaving = {name: _apart(made[name], received) for name in layout.sent}
        passing.received = {name: received[name] for name in layout.received_for_gradient}

    def _send_activation(self, action: Action) -> None:
        assert action.peer is not None
        passing = self.passing[action.minibatch]
        sends = self.forms.of(action.minibatch).layout.sends
        message = [passing.leaving[value.name] for value in sends[action.peer[0]]]
        self.transport.send(self._channel(action), message)
        if action.peer[0] == max(sends):
            passing.leaving = {}

    def _receive_gradient(self, action: Action) -> None:
        assert action.peer is not None
        gradients = self.passing[action.minibatch].gradients
        sends = self.forms.of(action.minibatch).layout.sends
        sent = [value for value in sends[action.peer[0]] if value.requires_grad]
        tensors = self.transport.receive(self._channel(action))
        for value, tensor in zip(sent, tensors, strict=True):
            known = gradients.get(value.name)
            gradients[value.name] = tensor if known is None else known + tensor

    def _backward(self, action: Action) -> None:
        passing, form = self.passing[action.minibatch], self.forms.of(action.minibatch)
        version = passing.version
        assert version is not None
        if passing.again is not None:
            self.dice.minibatch = action.minibatch
            with _computing(action):
                results = passing.again.run(form.compute, version.tensors)
            passing.again = None
            _keep_ends(passing, form, dict(zip(form.piece.outputs, results, strict=True)))
            del results
        self._find_gradients(action, passing, version)
        passing.received, passing.ends, passing.loss, passing.version = {}, {}, None, None
        for channel, message in passing.messages:
            self.transport.recycle(channel, message)
        passing.messages = []
        self.weights.release(version)
        if not form.layout.receives:
            del self.passing[action.minibatch]

    def _find_gradients(self, action: Action, passing: Passing, version: Version) -> None:
        """Those of the parameters go to the round, those of what was received are to be sent."""
        received = passing.received
        learning = [tensor for tensor in version.tensors.values() if tensor.requires_grad]
        wanted = [*learning, *received.values()]
        ends, end_gradients = self._ends(passing)
        passing.gradients = {}
        if ends and wanted:
            with (
                _computing(action),
                self.weights.accumulating(version),
                self._adding_up(action, version),
            ):
                torch.autograd.backward(ends, end_gradients, inputs=wanted)
        for name, tensor in received.items():
            passing.gradients[name] = (
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            )

    def _ends(self, passing: Passing) -> tuple[Sequence[Any], list[torch.Tensor] | None]:
        """Where the backward pass of this stage begins: at the loss, or at what was sent."""
        if passing.loss is not None:
            return ([passing.loss] if passing.loss.requires_grad else []), None
        names = [name for name in passing.gradients if name in passing.ends]
        return [passing.ends[n] for n in names], [passing.gradients[n] for n in names]

    def _send_gradient(self, action: Action) -> None:
        assert action.peer is not None
        gradients = self.passing[action.minibatch].gradients
        receives = self.forms.of(action.minibatch).layout.receives
        values = receives[action.peer[0]]
        message = [gradients.pop(value.name) for value in values if value.requires_grad]
        self.transport.send(self._channel(action), message)
        if action.peer[0] == max(receives):
            del self.passing[action.minibatch]

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
        if action.kind is Kind.BACKWARD:
            last = action.minibatch
        elif action.kind is Kind.ALL_REDUCE and last is not None:
            found.add(last)
            last = None
    return found


def _keep_ends(passing: Passing, form: Form, made: Mapping[str, torch.Tensor]) -> None:
    """Of what is sent the autograd graph needs the edges; the data may go once it is sent."""
    if passing.again is None:
        ends = {name: made[name] for name in form.layout.sent if made[name].requires_grad}
        passing.ends = {name: get_gradient_edge(tensor) for name, tensor in ends.items()}


def _apart(tensor: torch.Tensor, received: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A value to be sent, in memory that no later message will be received in."""
    memory = tensor.untyped_storage().data_ptr()
    shared = any(other.untyped_storage().data_ptr() == memory for other in received.values())
    return tensor.detach().clone() if shared else tensor.detach()

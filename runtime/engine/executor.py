"""How one replica of one stage trains: a small method for each kind of action."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from pipedream.capture.programs.loss_end import LOSS, Target
from pipedream.capture.segment import Segment
from pipedream.comm.buckets import Buckets, StageGroups
from pipedream.graph.errors import UserError
from pipedream.runtime.engine.forward import ForwardExecutor, Minibatches, Table, computing
from pipedream.runtime.engine.minibatch_state import BackwardRoots, MinibatchState, Recomputation
from pipedream.runtime.engine.program_passes import ProgramPasses
from pipedream.runtime.optim.stepping import Scale
from pipedream.runtime.optim.weights import Weights
from pipedream.runtime.stages.partition import StageInterface
from pipedream.runtime.stages.randomness import MinibatchRng
from pipedream.runtime.stages.stage_module import StageModule
from pipedream.runtime.stages.stage_program import NamedProgram
from pipedream.schedule.action import ENDS_BACKWARD, Action, Kind, uses


class Updates(Protocol):
    """What makes an update of a stage out of the gradients of a round; see `Stepping`."""

    scale: Scale

    def agree(self, stage: int, weights: Weights, divisor: int) -> None: ...

    def update(
        self, stage: int, number: int, weights: Weights, divisor: int, updates: int
    ) -> None: ...


@dataclass
class Executor(ForwardExecutor):
    """Trains one replica of one stage.

    `on_loss` is called with the loss of each minibatch in the last stage. `rng` seeds the passes of
    a minibatch. With `recompute` the backward pass repeats the forward pass first; not in the last
    stage, whose backward pass follows at once. `per_update` minibatches of a round count as one
    update for the learning rate scheduler.

    A stage that has backward passes in two halves runs as programs (`ProgramPasses`); whole ones
    are then both halves in turn. Of a stage that cannot be divided so, the halves go through the
    autograd graph twice: from the loss, or what was sent, to what was received, then once more to
    the parameters. The gradients between operators are then computed twice, and all saved tensors
    stay until the second half.
    """

    weights: Weights
    stepping: Updates
    groups: StageGroups
    on_loss: Callable[[int, Tensor], None]
    rng: MinibatchRng
    per_update: int = 1
    recompute: bool = False

    def begin(self, data: Minibatches) -> None:
        super().begin(data)
        self.base = self.weights.current.number
        self.weights.begin()

    def follow(self, actions: Sequence[Action], delays: Mapping[int, int]) -> None:
        super().follow(actions, delays)
        used = uses(action for action in actions if not delays.get(action.minibatch))
        self.weights.expect({self.base + version: count for version, count in used.items()})
        self.closing = _closing(actions)
        self.in_halves = any(action.kind is Kind.BACKWARD_INPUT for action in actions)

    def end(self) -> None:
        super().end()
        assert not self.weights.older

    @property
    def table(self) -> Table:
        return {
            **super().table,
            Kind.RECV_GRADIENT: self._receive_gradient,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.ALL_REDUCE: self._all_reduce,
            Kind.NORM: self._norm,
            Kind.UPDATE: self._update,
        }

    def _prepare(
        self, action: Action, state: MinibatchState, segment: Segment, inputs: tuple[Tensor, ...]
    ) -> Mapping[str, Tensor]:
        delay = self.delays.get(action.minibatch, 0)
        state.version = self.weights.acquire(self.base + action.version, delay)
        self.rng.minibatch = action.minibatch
        if self.recompute:
            state.recomputation = Recomputation.before(segment, inputs)
        return state.version.tensors

    def _compute(
        self,
        action: Action,
        state: MinibatchState,
        stage_module: StageModule,
        tensors: Mapping[str, Tensor],
        known: Mapping[str, Tensor],
    ) -> Mapping[str, Tensor]:
        piece, program = stage_module.piece, stage_module.program
        named: NamedProgram | None = None
        if self.sharding is not None:
            target = self._target(action)
            named = program.on_mesh(tensors, known, target)
            known = known if target is None else {**known, **target.tensors}
        elif self.in_halves:
            named = program.of(tensors, known)
        if named is None:
            results = stage_module.compute(tensors, tuple(known[name] for name in piece.inputs))
            return dict(zip(piece.outputs, results, strict=True))
        state.passes = ProgramPasses(stage_module, named)
        results = state.passes.forward(tensors, tuple(known[name] for name in named.inputs))
        return dict(zip(named.outputs, results, strict=True))

    def _target(self, action: Action) -> Target | None:
        """For programs that end in the loss."""
        if action.stage != self.last_stage:
            return None
        return Target.of(self.data.target(action.minibatch))

    def _take_outputs(
        self,
        action: Action,
        state: MinibatchState,
        stage_module: StageModule,
        known: Mapping[str, Tensor],
    ) -> None:
        loss = known[LOSS] if LOSS in known else self._loss(action, stage_module.output(known))
        if self.mesh_device == 0:  # the others have computed the same
            self.on_loss(action.minibatch, loss.detach())
        scale = self.stepping.scale.value
        state.loss = loss if scale == 1.0 else loss * scale

    def _loss(self, action: Action, output: Any) -> Tensor:
        try:
            return self.loss(output, self.data.target(action.minibatch))
        except UserError as error:
            message = f"{error.format_message()}, in minibatch {action.minibatch}"
            raise UserError(message) from error

    def _after_forward(
        self,
        action: Action,
        state: MinibatchState,
        interface: StageInterface,
        values: Mapping[str, Tensor],
    ) -> None:
        if state.passes is not None:
            if state.loss is not None:
                state.passes.hold_ends({**state.received, **values})
            if self.recompute:
                state.passes.saved = {}
        elif not self.recompute:
            _keep_edges(state, interface, values)
        received = state.received
        state.received = {name: received[name] for name in interface.received_for_gradient}

    def _receive_gradient(self, action: Action) -> None:
        assert action.peer is not None
        gradients = self.states[action.minibatch].gradients
        stage_module = self.stage_modules.of(action.minibatch)
        sends = stage_module.interface.sends[action.peer[0]]
        sent = [value for value in sends if value.requires_grad]
        tensors, _ = self.exchange.receive(action, stage_module.crossings)
        for value, tensor in zip(sent, tensors, strict=True):
            known = gradients.get(value.name)
            gradients[value.name] = tensor if known is None else known + tensor

    def _backward(self, action: Action) -> None:
        if self.states[action.minibatch].passes is not None:
            self._backward_input(action)
            self._backward_weight(action)
            return
        state = self._turn(action)
        assert state.ends is not None
        received = state.received.values()
        with self._learning(action, state) as parameters:
            state.ends.propagate([*parameters, *received])
        _keep_gradients(state)
        self._let_go(action.minibatch, state)

    def _backward_input(self, action: Action) -> None:
        """First half: computes the gradients of what was received, which can then be sent."""
        state = self._turn(action)
        if state.passes is not None:
            self._inputs_by_program(action, state, state.passes)
            return
        assert state.ends is not None
        with computing(action):
            state.ends.propagate(list(state.received.values()), retain_graph=True)
        _keep_gradients(state)

    def _inputs_by_program(
        self, action: Action, state: MinibatchState, passes: ProgramPasses
    ) -> None:
        """Afterwards nothing is held but what the second half needs, and what is to be sent."""
        with computing(action):
            found = passes.backward(list(state.received))
        for name, tensor in state.received.items():
            gradient = found[name]
            state.gradients[name] = torch.zeros_like(tensor) if gradient is None else gradient
        state.received = {}
        self._recycle(state, lambda tensor: passes.holds(tensor, state.gradients.values()))

    def _backward_weight(self, action: Action) -> None:
        """Second half: adds the gradients of the parameters to the round."""
        state = self.states[action.minibatch]
        if state.passes is not None:
            with computing(action):
                self._add_all(state.passes.weight_gradients(), action.minibatch in self.closing)
        else:
            assert state.ends is not None
            with self._learning(action, state) as parameters:
                state.ends.propagate(parameters)
        self._let_go(action.minibatch, state)

    def _add_all(self, gradients: Iterable[tuple[str, Tensor, bool]], closing: bool) -> None:
        """Adds to the gradients of the round; those of a `closing` pass are complete after that."""
        for name, gradient, own in gradients:
            self.weights.add(name, gradient, own)
            if closing:
                for buckets in self.buckets:
                    buckets.arrived(name, self.weights.gradients.get)

    def _turn(self, action: Action) -> MinibatchState:
        """Returns the state of a minibatch, with its graph and the roots of its backward pass.

        Gradients that were received move to `ends`; those to be sent are yet to be computed.
        """
        state, stage_module = self.states[action.minibatch], self.stage_modules.of(action.minibatch)
        assert state.version is not None
        if state.recomputation is not None:
            self.rng.minibatch = action.minibatch
            run = stage_module.compute if state.passes is None else state.passes.forward
            with computing(action):
                results = state.recomputation.run(run, state.version.tensors)
            state.recomputation = None
            values = dict(zip(stage_module.piece.outputs, results, strict=True))
            if state.passes is None:
                _keep_edges(state, stage_module.interface, values)
        if state.passes is None:
            state.ends = BackwardRoots.of(state)
        else:
            with computing(action):
                state.passes.turn(state.loss, state.gradients)
        state.gradients, state.edges, state.loss = {}, {}, None
        state.sent = not stage_module.interface.receives
        return state

    @contextmanager
    def _learning(self, action: Action, state: MinibatchState) -> Iterator[list[Tensor]]:
        """Yields the parameters; gradients computed inside are added to those of the round."""
        version = state.version
        assert version is not None
        with ExitStack() as summing, computing(action), self.weights.accumulating(version):
            if action.minibatch in self.closing:
                for buckets in self.buckets:  # over the replicas, meanwhile
                    summing.enter_context(buckets.filling(version.tensors))
            yield [tensor for tensor in version.tensors.values() if tensor.requires_grad]

    def _let_go(self, minibatch: int, state: MinibatchState) -> None:
        """Releases what the minibatch held, except what is still to be sent.

        Received activations are recycled, since no graph needs them any more.
        """
        version = state.version
        assert version is not None
        state.received, state.ends, state.passes, state.version = {}, None, None, None
        self._recycle(state)
        self.weights.release(version)
        if state.sent:
            del self.states[minibatch]

    def _send_gradient(self, action: Action) -> None:
        assert action.peer is not None
        state = self.states[action.minibatch]
        receives = self.stage_modules.of(action.minibatch).interface.receives
        values = receives[action.peer[0]]
        message = [state.gradients.pop(value.name) for value in values if value.requires_grad]
        self._send(action, message)
        if action.peer[0] == max(receives):
            state.sent = True
            if state.version is None:
                del self.states[action.minibatch]

    def _all_reduce(self, action: Action) -> None:
        """Adds up the gradients of the round over the replicas, or all holders of tied weights."""
        gradients = self.weights.gradients
        for buckets in self.buckets:
            buckets.finish(gradients)
        if self.groups.sums is not None:
            parameters = self.weights.parameters
            part_of = None if self.sharding is None else self.sharding.gradient_part
            self.groups.sums.add_up(action.stage, gradients, parameters, self.transport, part_of)

    @cached_property
    def buckets(self) -> tuple[Buckets, ...]:
        """For each group of ranks that add up gradients, of those it adds up."""
        partial = {} if self.sharding is None else self.sharding.partial
        by_axes: dict[tuple[int, ...], dict[str, Tensor]] = {}
        for name, parameter in self.weights.parameters.items():
            if parameter.requires_grad and name not in self.groups.tied:
                by_axes.setdefault(partial.get(name, ()), {})[name] = parameter
        groups = {axes: self.groups.adding_up(axes) for axes in by_axes}
        return tuple(
            Buckets(by_axes[axes], self.transport, group)
            for axes, group in groups.items()
            if group is not None
        )

    def _norm(self, action: Action) -> None:
        """Hands the gradients of the round in; the last stage of the rank waits for all ranks."""
        self.stepping.agree(action.stage, self.weights, action.divisor)

    def _update(self, action: Action) -> None:
        updates = -(-action.divisor // self.per_update)
        number = self.base + action.version
        self.stepping.update(action.stage, number, self.weights, action.divisor, updates)


def _closing(actions: Sequence[Action]) -> set[int]:
    """The minibatches whose backward pass is the last one of this worker before an all-reduce."""
    closing, last = set(), None
    for action in actions:
        if action.kind in ENDS_BACKWARD:
            last = action.minibatch
        elif action.kind is Kind.ALL_REDUCE and last is not None:
            closing.add(last)
            last = None
    return closing


def _keep_edges(
    state: MinibatchState, interface: StageInterface, values: Mapping[str, Tensor]
) -> None:
    """Keeps the graph edges of what is sent, so that its data can be freed once sent."""
    needed = {name: values[name] for name in interface.sent if values[name].requires_grad}
    state.edges = {name: get_gradient_edge(tensor) for name, tensor in needed.items()}


def _keep_gradients(state: MinibatchState) -> None:
    """Keeps the gradients of what was received, to be sent; zeros where the loss has none."""
    for name, tensor in state.received.items():
        state.gradients[name] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

"""How one replica of one stage trains: a small method for each kind of action."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from pipedream.capture.programs.loss_end import LOSS, Target
from pipedream.comm.buckets import Buckets
from pipedream.comm.stage_groups import StageGroups
from pipedream.comm.zero.gather import Gather
from pipedream.graph.errors import UserError
from pipedream.runtime.engine.forward import ForwardExecutor, Minibatches, Table, Tensors, computing
from pipedream.runtime.engine.minibatch_state import MinibatchState, Recomputation
from pipedream.runtime.engine.offload import OffloadedActivations
from pipedream.runtime.engine.passes import (
    AutogradPasses,
    Passes,
    ProgramPasses,
    RecordedPasses,
    RoundGradients,
)
from pipedream.runtime.optim.stepping import Scale
from pipedream.runtime.optim.weights import Weights
from pipedream.runtime.run.action_stream import Lateness
from pipedream.runtime.stages.partition import StageInterface
from pipedream.runtime.stages.randomness import MinibatchRng
from pipedream.runtime.stages.recordings import refused
from pipedream.runtime.stages.stage_module import StageModule
from pipedream.schedule.action import Action, Kind, uses
from pipedream.schedule.operations import closing


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
    stage, whose backward pass follows at once. With `offload` saved activations are in the memory
    of the host meanwhile. `per_update` minibatches of a round count as one
    update for the learning rate scheduler.

    A stage on a mesh, or that has backward passes in two halves, runs as programs
    (`ProgramPasses`); whole ones are then both halves in turn. Others, and one that cannot be
    divided so, run by autograd (`AutogradPasses`).
    """

    weights: Weights
    stepping: Updates
    groups: StageGroups
    on_loss: Callable[[int, Tensor], None]
    rng: MinibatchRng
    per_update: int = 1
    recompute: bool = False
    offload: OffloadedActivations | None = None

    def begin(self, data: Minibatches) -> None:
        super().begin(data)
        self.base = self.weights.current.number
        self.weights.begin()

    def follow(self, actions: Sequence[Action], lateness: Lateness) -> None:
        super().follow(actions, lateness)
        predicted = lateness.delays
        used = uses(action for action in actions if not predicted.get(action.minibatch))
        self.weights.expect({self.base + version: count for version, count in used.items()})
        if self.weights.feedback is not None:
            first = self.base + 1  # the version that update 0 makes
            pairs = lateness.makes_good.items()
            self.weights.feedback.follow({first + now: first + late for now, late in pairs})
        self.closing = closing(actions)
        passes = [action for action in actions if action.kind in (Kind.FORWARD, Kind.BACKWARD)]
        self.coming = {
            (one.kind, one.minibatch): other.minibatch
            for one, other in pairwise(passes)
            if other.kind is Kind.BACKWARD
        }
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

    def _compute(
        self, action: Action, state: MinibatchState, stage_module: StageModule, known: Tensors
    ) -> Tensors:
        delay = self.lateness.delays.get(action.minibatch, 0)
        state.version = self.weights.acquire(self.base + action.version, delay)
        self.rng.minibatch = action.minibatch
        if self.recompute:
            inputs = {name: known[name] for name in stage_module.piece.inputs}
            state.recomputation = Recomputation.before(stage_module.piece, inputs)
        tensors = state.version.tensors
        with computing(action):
            target = self._target(action)
            state.passes = self._passes(stage_module, tensors, known, target)
            ends = {} if target is None else target.tensors
            with self._saving(action, [*tensors.values(), *known.values()]):
                return state.passes.forward(tensors, {**known, **ends})

    @contextmanager
    def _saving(self, action: Action, held: Sequence[Tensor]) -> Iterator[None]:
        """What is saved inside moves to the host, if it is to."""
        if self.offload is None:
            yield
            return
        self._begin_pass(action)
        with self.offload.saving(action.minibatch, held):
            yield

    def _begin_pass(self, action: Action) -> None:
        if self.offload is not None:
            coming = self.coming.get((action.kind, action.minibatch))
            self.offload.begin_pass(action.minibatch, action.kind is Kind.BACKWARD, coming)

    def _passes(
        self, stage_module: StageModule, tensors: Tensors, known: Tensors, target: Target | None
    ) -> Passes:
        program = stage_module.program
        if self.sharding is not None:
            return ProgramPasses(stage_module, program.on_mesh(tensors, known, target))
        recordings = program.recordings
        named = program.of(tensors, known) if self.in_halves or recordings is not None else None
        if recordings is not None and program.obstacle is not None:
            raise UserError(refused(f"this model cannot be recorded: {program.obstacle}"))
        if named is None:
            return AutogradPasses(stage_module)
        if recordings is not None:
            return RecordedPasses(stage_module, named, recordings=recordings)
        return ProgramPasses(stage_module, named)

    def _target(self, action: Action) -> Target | None:
        """Returns what programs that end in the loss need; None for others."""
        if self.sharding is None or action.stage != self.last_stage:
            return None
        return Target.of(self.data.target(action.minibatch))

    def _take_outputs(
        self, action: Action, state: MinibatchState, stage_module: StageModule, known: Tensors
    ) -> None:
        loss = known[LOSS] if LOSS in known else self._loss(action, stage_module.output(known))
        if self.sharding is None or self.sharding.device == 0:  # the others have computed the same
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
        self, action: Action, state: MinibatchState, interface: StageInterface, values: Tensors
    ) -> None:
        assert state.passes is not None
        if state.loss is not None:
            state.passes.hold_ends({**state.received, **values})
        if self.recompute:
            state.passes.forget()
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
        self._backward_input(action, self._gradients(action))
        self._backward_weight(action)

    def _backward_input(self, action: Action, whole: RoundGradients | None = None) -> None:
        """Computes, as the first half, the gradients of what was received, which can then be sent.

        Afterwards nothing is held but what the second half needs, and what is to be sent.
        """
        state = self._turn(action)
        passes = state.passes
        assert passes is not None
        with computing(action):
            gradients = passes.backward(state.received, whole)
        for name, tensor in state.received.items():
            gradient = gradients[name]  # None where the loss does not depend on it
            state.gradients[name] = torch.zeros_like(tensor) if gradient is None else gradient
        state.received = {}
        self._recycle(state, lambda tensor: passes.holds(tensor, state.gradients.values()))

    def _backward_weight(self, action: Action) -> None:
        """Adds, as the second half, the gradients of the parameters to the round."""
        state = self.states[action.minibatch]
        assert state.passes is not None
        with computing(action):
            state.passes.backward_weights(self._gradients(action))
        self._release(action.minibatch, state)

    def _gradients(self, action: Action) -> RoundGradients:
        """Returns those of the round, to which the backward pass of a minibatch adds its own."""
        version = self.states[action.minibatch].version
        assert version is not None
        last = action.minibatch in self.closing
        return RoundGradients(self.weights, version, self.buckets if last else ())

    def _turn(self, action: Action) -> MinibatchState:
        """Returns the state of a minibatch, with what its forward pass leaves, to go backward.

        Gradients that were received move to `passes`; those to be sent are yet to be computed.
        """
        state = self.states[action.minibatch]
        assert state.version is not None
        assert state.passes is not None
        with computing(action):
            self._begin_pass(action)
            if state.recomputation is not None:
                self.rng.minibatch = action.minibatch
                state.recomputation.run(state.passes, state.version.tensors)
            state.passes.turn(state.loss, state.gradients)
        state.recomputation, state.gradients, state.loss = None, {}, None
        state.sent = not self.stage_modules.of(action.minibatch).interface.receives
        return state

    def _release(self, minibatch: int, state: MinibatchState) -> None:
        """Releases what the minibatch held, except what is still to be sent.

        Received activations are recycled, since no graph needs them any more.
        """
        version = state.version
        assert version is not None
        state.received, state.passes, state.version = {}, None, None
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
    def gather(self) -> Gather | None:
        """What makes the parameters whole after an update, if replicas divide them."""
        if self.weights.divided is None:
            return None
        assert self.groups.replicas is not None
        parameters = {n: each for n, each in self.weights.parameters.items() if each.requires_grad}
        return Gather(parameters, self.transport, self.groups.replicas)

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
            Buckets(
                by_axes[axes],
                self.transport,
                group,
                divided=self.weights.divided is not None and group is self.groups.replicas,
            )
            for axes, group in groups.items()
            if group is not None
        )

    def _norm(self, action: Action) -> None:
        """Hands in the gradients of the round; the last stage of the rank waits for all ranks."""
        self.stepping.agree(action.stage, self.weights, action.divisor)

    def _update(self, action: Action) -> None:
        updates = -(-action.divisor // self.per_update)
        number, divided = self.base + action.version, self.weights.divided
        self.stepping.update(action.stage, number, self.weights, action.divisor, updates)
        if divided is not None and self.gather is not None:
            self.gather.run(divided.parts)

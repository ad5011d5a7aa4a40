"""The passes of one minibatch through a stage that trains, and what stays between them.

Either autograd computes them, whose graph stays, or programs, of which after the gradients of the
inputs only what those of the weights need is held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipedream.capture.programs.loss_end import LOSS
from pipedream.capture.programs.program import Kept, Values
from pipedream.comm.buckets import Buckets
from pipedream.comm.device.copies import copy_all
from pipedream.runtime.optim.weights import Version, Weights
from pipedream.runtime.stages.recordings import Recordings, Slot
from pipedream.runtime.stages.stage_module import StageModule
from pipedream.runtime.stages.stage_program import NamedProgram


@dataclass(frozen=True)
class RoundGradients:
    """The gradients of the round in `weights`, for a pass on this version of them.

    `buckets` are there in the last pass of the round, and are sent while it still goes on: its
    gradients are complete as they come.
    """

    weights: Weights
    version: Version
    buckets: Sequence[Buckets]

    @contextmanager
    def accumulating(self) -> Iterator[list[Tensor]]:
        """Yields the parameters; what autograd adds to their gradients inside counts."""
        tensors = self.version.tensors
        with ExitStack() as summing:
            for buckets in self.buckets:  # over the replicas, meanwhile
                summing.enter_context(buckets.filling(tensors))
            summing.enter_context(self.weights.accumulating(self.version))
            yield [tensor for tensor in tensors.values() if tensor.requires_grad]

    def add(self, name: str, gradient: Tensor, own: bool) -> None:
        """Adds all that the pass has for a parameter; `own`: its memory is for it alone."""
        self.weights.add(name, gradient, own)
        for buckets in self.buckets:
            buckets.arrived(name, self.weights.gradients.get)


class Passes(ABC):
    """The passes of one minibatch, called in this order: `forward`, `hold_ends` in the last stage,
    `forget` and `forward` again where a stage recomputes, `turn`, `backward`, `backward_weights`.
    """

    @abstractmethod
    def forward(
        self, tensors: Mapping[str, Tensor], known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns the outputs by name. `tensors` are parameters and buffers, `known` has what the
        stage received or read.
        """

    @abstractmethod
    def hold_ends(self, known: Mapping[str, Tensor]) -> None:
        """Takes note of the received values and outputs, which a loss was made of."""

    @abstractmethod
    def forget(self) -> None:
        """Gives up what the forward pass has left, which comes again when that is repeated."""

    @abstractmethod
    def turn(self, loss: Tensor | None, gradients: Mapping[str, Tensor]) -> None:
        """Begins to go backward, at the loss or at the `gradients` of what was sent."""

    @abstractmethod
    def backward(
        self, received: Mapping[str, Tensor], whole: RoundGradients | None = None
    ) -> dict[str, Tensor | None]:
        """Returns the gradients of these received values: the first half of a backward pass.

        With `whole` the second half follows at once, and may be done at the same time.
        """

    @abstractmethod
    def backward_weights(self, gradients: RoundGradients) -> None:
        """Adds the gradients of the parameters, unless `backward` has."""

    @abstractmethod
    def holds(self, tensor: Tensor, others: Iterable[Tensor]) -> bool:
        """Returns whether what `backward_weights` needs, or one of the others, is in memory of
        `tensor`.
        """


@dataclass
class AutogradPasses(Passes):
    """Passes by autograd. `edges`: by name graph edges, without data, of sent values that need a
    gradient; `roots`: where a backward pass under way begins, at the loss or at these edges, with
    its `gradients`.

    Two halves go through the graph twice: to what was received, then once more to the parameters.
    The gradients between operators are then computed twice, and all saved tensors stay until the
    second half.
    """

    stage_module: StageModule
    edges: dict[str, GradientEdge] = field(default_factory=dict)
    roots: Sequence[Tensor] | Sequence[GradientEdge] = ()
    gradients: Sequence[Tensor] | None = None

    def forward(
        self, tensors: Mapping[str, Tensor], known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Keeps the edges of what is sent, so that its data can be freed once sent."""
        piece, interface = self.stage_module.piece, self.stage_module.interface
        results = self.stage_module.compute(tensors, tuple(known[name] for name in piece.inputs))
        values = dict(zip(piece.outputs, results, strict=True))
        sent = {name: values[name] for name in interface.sent if values[name].requires_grad}
        self.edges = {name: get_gradient_edge(tensor) for name, tensor in sent.items()}
        return values

    def hold_ends(self, known: Mapping[str, Tensor]) -> None:
        """The graph of the loss holds them."""

    def forget(self) -> None:
        self.edges = {}

    def turn(self, loss: Tensor | None, gradients: Mapping[str, Tensor]) -> None:
        if loss is not None:
            self.roots, self.gradients = [loss] if loss.requires_grad else [], None
        else:
            names = [name for name in gradients if name in self.edges]
            self.roots = [self.edges[name] for name in names]
            self.gradients = [gradients[name] for name in names]
        self.edges = {}

    def backward(
        self, received: Mapping[str, Tensor], whole: RoundGradients | None = None
    ) -> dict[str, Tensor | None]:
        """A whole pass goes through the graph once, to received values and to parameters."""
        leaves = list(received.values())
        if whole is None:
            self._propagate(leaves, retain_graph=True)
        else:
            with whole.accumulating() as parameters:
                self._propagate([*parameters, *leaves])
            self.roots, self.gradients = (), None
        return {name: tensor.grad for name, tensor in received.items()}

    def backward_weights(self, gradients: RoundGradients) -> None:
        if self.roots:
            with gradients.accumulating() as parameters:
                self._propagate(parameters)

    def holds(self, tensor: Tensor, others: Iterable[Tensor]) -> bool:
        """The graph of autograd holds all that the passes need."""
        return True

    def _propagate(self, to: Sequence[Tensor], retain_graph: bool = False) -> None:
        """Adds to the `grad` of these leaves; with `retain_graph` the graph can be used again."""
        if self.roots and to:
            torch.autograd.backward(
                self.roots, self.gradients, retain_graph=retain_graph, inputs=to
            )


@dataclass
class ProgramPasses(Passes):
    """Passes by programs. `ends`: in the last stage, the loss if the program ends in it, else the
    outputs of the model that have a gradient, by name; `gradients`: of outputs, once the minibatch
    goes backward.
    """

    stage_module: StageModule
    named: NamedProgram
    saved: Values = field(default_factory=dict)
    kept: Kept | None = None
    ends: dict[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Tensor | None] = field(default_factory=dict)

    def forward(
        self, tensors: Mapping[str, Tensor], known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The outputs are leaves, of which a loss is computed."""
        program, inputs = self.named.program, tuple(known[name] for name in self.named.inputs)
        state = self.stage_module.program.state(tensors, self.named)
        results, self.saved = program.forward(state, inputs, program.draw())
        return self._leaves(results)

    def _leaves(self, results: Sequence[Tensor]) -> dict[str, Tensor]:
        differentiable = self.named.program.joint.differentiable
        leaves = (
            result.detach().requires_grad_(number in differentiable)
            for number, result in enumerate(results)
        )
        return dict(zip(self.named.outputs, leaves, strict=True))

    def hold_ends(self, known: Mapping[str, Tensor]) -> None:
        names = (LOSS,) if LOSS in self.named.outputs else self.stage_module.outputs
        outputs = {name: known[name] for name in names if name in known}
        self.ends = {name: value for name, value in outputs.items() if value.requires_grad}

    def forget(self) -> None:
        self.saved = {}

    def turn(self, loss: Tensor | None, gradients: Mapping[str, Tensor]) -> None:
        self.gradients = gradients if loss is None else _of_loss(loss, self.ends)
        self.ends = {}

    def backward(
        self, received: Mapping[str, Tensor], whole: RoundGradients | None = None
    ) -> dict[str, Tensor | None]:
        """Received values may be outputs of the model themselves: their gradients are added."""
        program, gradients = self.named.program, self.gradients
        outputs = (self.named.outputs[number] for number in program.joint.differentiable)
        tangents = [gradients.get(name) for name in outputs]
        of_inputs, self.kept = program.backward(self.saved, tangents)
        return self._of_received(received, of_inputs)

    def _of_received(
        self, received: Mapping[str, Tensor], of_inputs: Sequence[Tensor | None]
    ) -> dict[str, Tensor | None]:
        by_name, gradients = dict(zip(self.named.inputs, of_inputs, strict=True)), self.gradients
        self.gradients = {}
        return {name: _sum(by_name.get(name), gradients.get(name)) for name in received}

    def backward_weights(self, gradients: RoundGradients) -> None:
        assert self.kept is not None
        program = self.named.program
        for name, gradient in program.weight_gradients(self.kept):
            gradients.add(name, gradient, name in program.own)

    def holds(self, tensor: Tensor, others: Iterable[Tensor]) -> bool:
        assert self.kept is not None
        memory, kept = tensor.untyped_storage().data_ptr(), self.kept.values.values()
        return any(each.untyped_storage().data_ptr() == memory for each in (*kept, *others))


@dataclass
class RecordedPasses(ProgramPasses):
    """Passes that were recorded, where a slot for them is free; else by programs. The first ones
    are recorded once they are done, with their state and inputs, `first`.
    """

    recordings: Recordings = field(kw_only=True)
    slot: Slot | None = None
    first: tuple[Mapping[str, Tensor], Sequence[Tensor]] | None = None

    def forward(
        self, tensors: Mapping[str, Tensor], known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        state = self.stage_module.program.state(tensors, self.named)
        inputs = tuple(known[name].detach() for name in self.named.inputs)
        if self.recordings.wanted:
            self.first = state, inputs
        self.slot = self.recordings.take(state)
        if self.slot is None:
            return super().forward(tensors, known)
        copy_all(zip(self.slot.inputs, inputs, strict=True))
        copy_all(zip(self.slot.drawn, self.named.program.draw(), strict=True))
        self.slot.forward()
        return self._leaves([each.clone() for each in self.slot.outputs])

    def forget(self) -> None:
        super().forget()
        self._give_back()

    def backward(
        self, received: Mapping[str, Tensor], whole: RoundGradients | None = None
    ) -> dict[str, Tensor | None]:
        outputs = (self.named.outputs[n] for n in self.named.program.joint.differentiable)
        given = [self.gradients.get(name) for name in outputs]
        if self.slot is None:
            return super().backward(received, whole)
        if any(gradient is None for gradient in given):  # which no recording has
            self.saved = dict(self.slot.saved)
            return super().backward(received, whole)
        copy_all(zip(self.slot.tangents, [each for each in given if each is not None], strict=True))
        self.slot.backward()
        self.kept = self.slot.kept
        of_inputs = [None if each is None else each.clone() for each in self.slot.of_inputs]
        return self._of_received(received, of_inputs)

    def backward_weights(self, gradients: RoundGradients) -> None:
        if self.slot is None or self.kept is not self.slot.kept:
            super().backward_weights(gradients)
        else:
            self.slot.weights()
            for name, gradient in self.slot.gradients:
                gradients.add(name, gradient, own=False)
        self._give_back()
        if self.first is not None and self.recordings.wanted:
            self.recordings.record(self.named.program, *self.first)

    def holds(self, tensor: Tensor, others: Iterable[Tensor]) -> bool:
        return self.first is not None or super().holds(tensor, others)

    def _give_back(self) -> None:
        if self.slot is not None:
            self.recordings.free.append(self.slot)
            self.slot = None


def _of_loss(loss: Tensor, ends: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Returns the gradients of `loss` by these outputs; None where it does not depend on one."""
    if not loss.requires_grad or not ends:
        return {}
    gradients = torch.autograd.grad(loss, list(ends.values()), allow_unused=True)
    return dict(zip(ends, gradients, strict=True))


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other

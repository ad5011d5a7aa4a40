"""The passes of one minibatch through a stage that runs as programs, and what stays between them.

The counterpart of an autograd graph. After the gradients of the inputs only what those of the
weights need is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipedream.capture.programs.program import Kept, Program, Values
from pipedream.runtime.stages.stage_module import StageModule


@dataclass
class ProgramPasses:
    """`ends`: in the last stage, the outputs of the model that have a gradient, by name;
    `gradients`: of outputs, once the minibatch goes backward.
    """

    stage_module: StageModule
    program: Program
    saved: Values = field(default_factory=dict)
    kept: Kept | None = None
    ends: dict[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Tensor | None] = field(default_factory=dict)

    def forward(
        self, tensors: Mapping[str, Tensor], inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """The outputs, as leaves of a loss."""
        state = self.stage_module.program.state(tensors)
        results, self.saved = self.program.forward(state, inputs, self.program.draw())
        differentiable = self.program.joint.differentiable
        return tuple(
            result.detach().requires_grad_(number in differentiable)
            for number, result in enumerate(results)
        )

    def hold_ends(self, known: Mapping[str, Tensor]) -> None:
        """Called in the last stage with received values and outputs, which a loss was made of."""
        outputs = {name: known[name] for name in self.stage_module.outputs if name in known}
        self.ends = {name: value for name, value in outputs.items() if value.requires_grad}

    def turn(self, loss: Tensor | None, gradients: Mapping[str, Tensor]) -> None:
        """Begins to go backward, at the loss or at the `gradients` of what was sent."""
        self.gradients = gradients if loss is None else _of_loss(loss, self.ends)
        self.ends = {}

    def backward(self, received: Sequence[str]) -> dict[str, Tensor | None]:
        """The gradients of these received values, which may be outputs of the model themselves."""
        piece, gradients = self.stage_module.piece, self.gradients
        outputs = (piece.outputs[number] for number in self.program.joint.differentiable)
        tangents = [gradients.get(name) for name in outputs]
        of_inputs, self.kept = self.program.backward(self.saved, tangents)
        by_name, self.gradients = dict(zip(piece.inputs, of_inputs, strict=True)), {}
        return {name: _sum(by_name.get(name), gradients.get(name)) for name in received}

    def weight_gradients(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Each gradient of a parameter, with its name and whether its memory is its own."""
        assert self.kept is not None
        for name, gradient in self.program.weight_gradients(self.kept):
            yield name, gradient, name in self.program.own

    def holds(self, tensor: Tensor, others: Iterable[Tensor]) -> bool:
        """Whether what is kept for the weights, or one of the others, is in memory of `tensor`."""
        assert self.kept is not None
        memory, kept = tensor.untyped_storage().data_ptr(), self.kept.values.values()
        return any(each.untyped_storage().data_ptr() == memory for each in (*kept, *others))


def _of_loss(loss: Tensor, ends: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """The gradients of `loss` by these outputs of a model; None where it does not depend on one."""
    if not loss.requires_grad or not ends:
        return {}
    found = torch.autograd.grad(loss, list(ends.values()), allow_unused=True)
    return dict(zip(ends, found, strict=True))


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other

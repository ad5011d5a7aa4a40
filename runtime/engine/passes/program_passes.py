"""The passes of one minibatch through a stage that runs as programs, and what stays between them.

After the gradients of the inputs only what those of the weights need is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipedream.capture.programs.loss_end import LOSS
from pipedream.capture.programs.program import Kept, Values
from pipedream.runtime.engine.passes.passes import Passes
from pipedream.runtime.engine.passes.round_gradients import RoundGradients
from pipedream.runtime.stages.stage_module import StageModule
from pipedream.runtime.stages.stage_program import NamedProgram


@dataclass
class ProgramPasses(Passes):
    """`ends`: in the last stage, the loss if the program ends in it, else the outputs of the model
    that have a gradient, by name; `gradients`: of outputs, once the minibatch goes backward.
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
        """The outputs are leaves of a loss."""
        program, inputs = self.named.program, tuple(known[name] for name in self.named.inputs)
        state = self.stage_module.program.state(tensors, self.named)
        results, self.saved = program.forward(state, inputs, program.draw())
        differentiable = program.joint.differentiable
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
        """The received values may be outputs of the model themselves."""
        program, gradients = self.named.program, self.gradients
        outputs = (self.named.outputs[number] for number in program.joint.differentiable)
        tangents = [gradients.get(name) for name in outputs]
        of_inputs, self.kept = program.backward(self.saved, tangents)
        by_name, self.gradients = dict(zip(self.named.inputs, of_inputs, strict=True)), {}
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

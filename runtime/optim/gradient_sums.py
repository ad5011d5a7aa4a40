"""Gradients for an optimizer of the user's: those of a call, which the loss that it returns adds to
the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from pipedream.runtime.optim.stepping import Scale
from pipedream.runtime.optim.weights import Weights


class GradientSums:
    """In the place of `Stepping` for one stage: an update changes no weights, and leaves its
    `gradients` here, by name. `scale`: of the loss, and so of the gradients.
    """

    def __init__(self, scale: Scale | None = None) -> None:
        self.scale = scale or Scale()
        self.gradients: Mapping[str, Tensor] = {}

    def agree(self, stage: int, weights: Weights, divisor: int) -> None:
        raise AssertionError("the user's loop clips, if anybody does")

    def update(self, stage: int, number: int, weights: Weights, divisor: int, updates: int) -> None:
        before = {name: parameter.grad for name, parameter in weights.parameters.items()}
        self.gradients = weights.take_gradients(divisor)

        def leave() -> None:
            for name, parameter in weights.parameters.items():
                parameter.grad = before[name]

        weights.update({}, leave, number)


def with_gradients(loss: Tensor, gradients: Sequence[tuple[Parameter, Tensor]]) -> Tensor:
    """Returns the loss as a scalar that autograd knows: it depends on these parameters, and its
    gradient of each is the one given. What autograd does with a loss it does with this one: several
    are added up and scaled, a graph that is retained can be gone through again, and one that is not
    needed any more is freed. It cannot be differentiated twice.
    """
    # Where no parameter of this rank learns, a loop calls backward, too.
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    parameters = [parameter for parameter, _ in gradients]
    known = [gradient for _, gradient in gradients]
    computed: Tensor = _Computed.apply(loss, known, anchor, *parameters)  # type: ignore[no-untyped-call]
    return computed


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor], *_: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [gradient * factor for gradient in ctx.saved_tensors]
        return None, None, None, *scaled

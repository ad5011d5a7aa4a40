"""Gradients for an optimizer of the user's: they are added to those that the parameters have."""

from __future__ import annotations

from torch import Tensor

from pipedream.runtime.engine.weights import Weights
from pipedream.runtime.optim.stepping import Scale


class GradientSums:
    """In the place of `Stepping` for one stage: an update changes no weights, and keeps its
    gradients until they are added.

    `shared`: whether gradients come in memory that the next round uses again.
    """

    def __init__(self, shared: bool) -> None:
        self.shared, self.scale = shared, Scale()
        self.gradients: dict[str, Tensor] = {}

    def agree(self, stage: int, weights: Weights, divisor: int) -> None:
        raise AssertionError("the user's loop clips, if anybody does")

    def update(self, stage: int, number: int, weights: Weights, divisor: int, updates: int) -> None:
        before = {name: parameter.grad for name, parameter in weights.parameters.items()}
        self.gradients = weights.take_gradients(divisor)

        def leave() -> None:
            for name, parameter in weights.parameters.items():
                parameter.grad = before[name]

        weights.update({}, leave, number)

    def add(self, weights: Weights, factor: float) -> None:
        """Adds the gradients of the last update, times `factor`, to those of the parameters."""
        for name, gradient in self.gradients.items():
            parameter = weights.parameters[name]
            if parameter.grad is not None:
                parameter.grad.add_(gradient, alpha=factor)
            elif factor != 1.0 or self.shared:
                parameter.grad = gradient * factor
            else:
                parameter.grad = gradient
        self.gradients = {}

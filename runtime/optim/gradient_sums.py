"""Gradients for an optimizer of the user's: they are added to those that the parameters have."""

from __future__ import annotations

from torch import Tensor

from pipedream.runtime.engine.weights import Weights
from pipedream.runtime.optim.stepping import Scale


class GradientSums:
    """In the place of `Stepping`: an update changes no weights, and leaves its gradients.

    `shared`: whether gradients come in memory that the next round uses again.
    """

    def __init__(self, shared: bool) -> None:
        self.shared, self.scale = shared, Scale()

    def update(self, stage: int, number: int, weights: Weights, divisor: int, updates: int) -> None:
        gradients = weights.take_gradients(divisor)
        before = {name: parameter.grad for name, parameter in weights.parameters.items()}

        def add() -> None:
            for name, parameter in weights.parameters.items():
                parameter.grad = self._sum(before[name], gradients.get(name))

        weights.update(gradients, add, number)

    def _sum(self, before: Tensor | None, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return before
        if before is None:
            return gradient.clone() if self.shared else gradient
        return before.add_(gradient)

"""The forward and backward pass of one minibatch through a stage, and what stays between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from torch import Tensor

from pipedream.runtime.engine.passes.round_gradients import RoundGradients


class Passes(ABC):
    """Called in this order: `forward`, `hold_ends` in the last stage, `forget` and `forward` again
    where a stage recomputes, `turn`, `backward`, `backward_weights`.
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
        """Whether what `backward_weights` needs, or one of the others, is in memory of `tensor`."""

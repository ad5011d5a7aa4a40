"""Where a backward pass adds the gradients of parameters: to those of its round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import Tensor

from pipedream.comm.buckets import Buckets
from pipedream.runtime.optim.weights import Version, Weights


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

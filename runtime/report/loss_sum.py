"""The losses of an epoch added up, so that every rank knows their mean at its end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class LossSum:
    """`value` is the sum of the epoch so far, the same on all ranks whenever a segment has ended.

    `add_up` replaces a tensor by its sum over all ranks.
    """

    def __init__(self, add_up: Callable[[Tensor], None], device: torch.device) -> None:
        self.add_up = add_up
        self.noted = torch.zeros(1, dtype=torch.float64, device=device)
        self.value = 0.0

    def note(self, loss: Tensor) -> None:
        """A loss that only this rank knows. Waits for no GPU."""
        self.noted += loss

    def end_segment(self) -> None:
        self.add_up(self.noted)
        self.value += self.noted.item()
        self.noted.zero_()

    def end_epoch(self, minibatches: int) -> float:
        """The mean over all of the epoch; the next one begins."""
        mean, self.value = self.value / minibatches, 0.0
        return mean

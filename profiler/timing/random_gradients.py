"""Gradients for what a model gives, where there is no loss to give them."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class RandomGradients:
    """Random gradients for any output, drawn once: drawing can cost more than the node."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.drawn: dict[torch.dtype, Tensor] = defaultdict(lambda: torch.empty(0))

    def like(self, value: Tensor) -> Tensor:
        if self.drawn[value.dtype].numel() < value.numel():
            self.drawn[value.dtype] = torch.randn(
                value.numel(), dtype=value.dtype, device=self.device
            )
        random_gradients = self.drawn[value.dtype][: value.numel()].view(value.shape)
        return torch.empty_like(value).copy_(random_gradients)

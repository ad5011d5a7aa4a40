"""A model in which most kinds of mistakes would show."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Varied(nn.Module):
    """Layers of one shape, two values that cross a cut in its middle, buffers, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.norm, self.dropout = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        self.seen.add_(x.detach().mean(0))
        y = torch.sigmoid(self.b(x))
        z = self.dropout(self.norm(self.c(2 * x + y)))
        out: Tensor = self.d(z) + x
        return out


class Auxiliary(Varied):
    """It also returns what a head beside its second layer says."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.head(x)


def of_the_first(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output[0], target)

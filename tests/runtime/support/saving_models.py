"""Models of which backward passes need much, and in several ways."""

from __future__ import annotations

import torch
from one_rank import Data
from torch import Tensor, nn

from pipedream.runtime.data.batch import Batch

EACH = 4096 * 6 * 4
"""Bytes of what each layer of `Layers` saves."""


class Block(nn.Module):
    """A transformer block with attention written out, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(6), nn.LayerNorm(6)
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        scores = torch.softmax(q @ k.transpose(-2, -1) / 6**0.5, -1)
        x = x + self.out(self.drop(scores) @ v)
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.second(x)))))


class Convolutions(nn.Module):
    """Batch norms, whose statistics are to be written once, and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 1, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(1)])
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norms[0](self.a(x[:, None])))
        h = self.act(self.norms[0](h)).mul_(2.0)
        return self.norms[1](self.b(h))[:, 0] + x


class Shared(nn.Module):
    """A weight that two layers of a stage share, a frozen one, a split and a permanent view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.b.weight = self.a.weight
        self.c.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        one, other = self.c(h).sort(-1)[0].split(3, -1)
        return torch.cat([one.exp(), other.sin() * one], -1)


def blocks() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(3)))


def wide(count: int) -> Data:
    x, y = torch.randn(2, count, 4096, 6)
    return Data([Batch((a,), b) for a, b in zip(x, y, strict=True)])


class Layers(nn.Module):
    """Layers of which each saves what it gives: `count` times 4096 x 6 numbers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

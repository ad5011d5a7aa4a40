"""Handwritten digits and a small residual network, used by digits.yaml."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def data(held_out: float = 0.2, seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """The 1,797 scanned digits of scikit-learn: (training set, held-out set), split by `seed`.

    An example is a float32 image [1, 8, 8] in [0, 1] and its digit, an int64 scalar. Both sets have
    the digits in the same proportions.
    """
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    digits = torch.tensor(bunch.target, dtype=torch.int64)
    train, test = train_test_split(
        range(len(digits)), test_size=held_out, random_state=seed, stratify=bunch.target
    )
    return TensorDataset(images[train], digits[train]), TensorDataset(images[test], digits[test])


class Block(nn.Module):
    """A residual block of two convolutions; keeps the shape [batch, channels, h, w]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first_norm(self.first(x)))
        return self.relu(x + self.second_norm(self.second(y)))


def model(channels: int = 32, dropout: float = 0.2) -> nn.Module:
    """A network from images [batch, 1, 8, 8] to logits [batch, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        Block(channels),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        Block(2 * channels),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * channels, 10),
    )

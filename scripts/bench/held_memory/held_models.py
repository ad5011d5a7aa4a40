"""Models and data that are trained to see what a process holds; no file is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

FEW = 64
"""Examples that are kept, and given again and again: the data themselves are to weigh little."""


class Repeated:
    """The examples of a data set again and again, until there are so many."""

    def __init__(self, dataset: TensorDataset, examples: int) -> None:
        self.dataset, self.examples = dataset, examples

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % len(self.dataset)]


def images(size: int, examples: int) -> tuple[Repeated, None]:
    """Noise of three channels, and one of ten classes."""
    few = TensorDataset(torch.randn(FEW, 3, size, size), torch.arange(FEW) % 10)
    return Repeated(few, examples), None


def tokens(length: int, examples: int, vocabulary: int = 2_000) -> tuple[Repeated, None]:
    """Sequences [length], and themselves as labels."""
    words = torch.randint(0, vocabulary, (FEW, length))
    return Repeated(TensorDataset(words, words), examples), None


def vectors(width: int, examples: int) -> tuple[Repeated, None]:
    """Vectors [width], and one of ten classes."""
    return Repeated(TensorDataset(torch.randn(FEW, width), torch.arange(FEW) % 10), examples), None


def next_word(output: Any, target: Tensor) -> Tensor:
    """Cross entropy of the logits [batch, length, words] of a language model."""
    logits = output["logits"] if isinstance(output, dict) else output
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def mlp(width: int, layers: int) -> nn.Module:
    hidden = (part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU()))
    return nn.Sequential(*hidden, nn.Linear(width, 10))


class Speech(nn.Module):
    """Words [batch, length] through LSTM layers to logits [batch, length, words]."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


def lstm(words: int = 2_000, width: int = 512, layers: int = 4) -> nn.Module:
    return Speech(words, width, layers)

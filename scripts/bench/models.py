"""Models of known shape and data for them: what the benchmarks train."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parents[2]))
from configs import topics_gpt

EXAMPLES = 4_096


def mlp(width: int = 1_024, layers: int = 8) -> nn.Module:
    """Equal layers [batch, width] -> [batch, width]."""
    parts = (part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU()))
    return nn.Sequential(*parts)


def mlp_data(width: int = 1_024, examples: int = EXAMPLES) -> tuple[TensorDataset, None]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, width, generator=generator)
    return TensorDataset(x, x.roll(1, dims=1)), None


def vgg(width: int = 64, classes: int = 10) -> nn.Module:
    """The first four blocks of VGG-16 on pictures [batch, 3, 32, 32], and two linear layers."""
    parts: list[nn.Module] = []
    channels = 3
    for block, convolutions in enumerate((2, 2, 3, 3)):
        out = width * 2**block
        for _ in range(convolutions):
            parts += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()]
            channels = out
        parts.append(nn.MaxPool2d(2))
    hidden = 4 * width
    parts += [nn.Flatten(), nn.Linear(4 * channels, hidden), nn.ReLU(), nn.Linear(hidden, classes)]
    return nn.Sequential(*parts)


def vgg_data(examples: int = EXAMPLES) -> tuple[TensorDataset, None]:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(examples, 3, 32, 32, generator=generator)
    classes = torch.randint(0, 10, (examples,), generator=generator)
    return TensorDataset(pictures, classes), None


def gpt_data(length: int = 64, examples: int = EXAMPLES) -> tuple[TensorDataset, None]:
    train, _ = topics_gpt.data(length)
    return TensorDataset(*train[:examples]), None


gpt = topics_gpt.model
gpt_loss = topics_gpt.loss


def vgg16_head() -> nn.Module:
    """The classifier of VGG-16 on features [batch, 512, 7, 7], for 1,000 classes."""
    parts = (nn.Linear(512 * 7 * 7, 4_096), nn.ReLU(), nn.Linear(4_096, 4_096), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *parts, nn.Linear(4_096, 1_000))


def vgg16_head_data(examples: int = 640) -> tuple[TensorDataset, None]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(examples, 512, 7, 7, generator=generator)
    classes = torch.randint(0, 1_000, (examples,), generator=generator)
    return TensorDataset(features, classes), None


def token_data(
    tokens: int = 64, vocabulary: int = 4_096, examples: int = 320
) -> tuple[TensorDataset, None]:
    """Sequences [tokens] and their labels, for models of transformers."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (examples, tokens), generator=generator)
    return TensorDataset(ids, ids), None


def image_data(size: int = 64, examples: int = 384) -> tuple[TensorDataset, None]:
    """Pictures [3, size, size] of ten classes."""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(examples, 3, size, size, generator=generator)
    return TensorDataset(pictures, torch.randint(0, 10, (examples,), generator=generator)), None

"""A byte-level GPT and the text of Python's help topics, used by topics.yaml."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

BYTES = 256


def data(length: int = 64, held_out: float = 0.1) -> tuple[TensorDataset, TensorDataset]:
    """The text in windows of `length` bytes: (training set, held-out set), split near the end.

    An example is a window and the same window one byte later, both int64 [length]: the model learns
    to predict the next byte at each position. Windows do not overlap.
    """
    text = "\n".join(topics[name] for name in sorted(topics))
    stream = torch.tensor(list(text.encode()), dtype=torch.int64)
    count = (len(stream) - 1) // length
    windows = stream[: count * length].view(count, length)
    following = stream[1 : count * length + 1].view(count, length)
    first = count - round(count * held_out)
    return (
        TensorDataset(windows[:first], following[:first]),
        TensorDataset(windows[first:], following[first:]),
    )


def loss(logits: Tensor, following: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte, of logits [batch, length, 256] and the next bytes."""
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


class Attention(nn.Module):
    """Causal self-attention over [batch, length, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        parts = self.queries_keys_values(x).chunk(3, dim=-1)
        query, key, value = (part.view(split).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A transformer block: attention, then a two-layer network, both residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Gpt(nn.Module):
    """Bytes int64 [batch, length] to the logits of the next byte [batch, length, 256]."""

    def __init__(self, length: int, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def model(
    length: int = 64, width: int = 128, heads: int = 4, layers: int = 4, dropout: float = 0.1
) -> nn.Module:
    """A GPT for windows of at most `length` bytes; `heads` divides `width`."""
    return Gpt(length, width, heads, layers, dropout)

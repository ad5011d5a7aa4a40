"""A translation model like GNMT (Wu et al., 2016) and digit strings to reverse; see gnmt.yaml.

LSTM encoder and decoder: the first encoder layer is bidirectional, and layers from the third on are
residual. The output of the first decoder layer is the query of an additive attention over the
encoder's output (Bahdanau et al., 2015); its result goes to all later decoder layers and to the
projection.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

BEGIN = 0  # the first decoder input; digits are 1 to 10


def data(
    length: int = 8, examples: int = 4096, held_out: float = 0.1, seed: int = 0
) -> tuple[TensorDataset, TensorDataset]:
    """Random digit strings and their reverses: (training set, held-out set).

    An example is ((source, decoder input), target), each int64 [length], for teacher
    forcing: the decoder reads the target shifted by one. The sets share no strings.
    """
    random = torch.Generator().manual_seed(seed)
    source = torch.randint(1, 11, (examples, length), generator=random).unique(dim=0)
    source = source[torch.randperm(len(source), generator=random)]
    target = source.flip(1)
    read = F.pad(target[:, :-1], (1, 0), value=BEGIN)
    first = len(source) - round(len(source) * held_out)
    return _Pairs(source[:first], read[:first], target[:first]), _Pairs(
        source[first:], read[first:], target[first:]
    )


class _Pairs(TensorDataset):
    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:  # type: ignore[override]
        source, read, target = super().__getitem__(index)
        return (source, read), target


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of logits [batch, length, vocabulary] for target [batch, length]."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Layer(nn.Module):
    """An LSTM from [batch, length, inputs] to [batch, length, width], residual with `skip`.

    `context` is concatenated to the input x; the residual connection is around x.
    """

    def __init__(self, inputs: int, width: int, dropout: float, skip: bool) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(inputs, width, batch_first=True)
        self.skip = skip

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        read = self.dropout(x)
        out, _ = self.lstm(read if context is None else torch.cat((read, context), dim=-1))
        return out + x if self.skip else out


class Encoder(nn.Module):
    """Tokens [batch, length] to [batch, length, width]; the first layer is bidirectional."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.both_ways = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.layers = nn.ModuleList(
            Layer(width if index else 2 * width, width, dropout, skip=index > 0)
            for index in range(layers - 1)
        )

    def forward(self, source: Tensor) -> Tensor:
        x, _ = self.both_ways(self.dropout(self.embed(source)))
        for layer in self.layers:
            x = layer(x)
        return x


class Attention(nn.Module):
    """Additive attention, with scores v . tanh(query + key)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, queries: Tensor, values: Tensor) -> Tensor:
        """Means of `values` [batch, length, width] for `queries` [batch, target, width]."""
        scores = self.query(queries).unsqueeze(2) + self.key(values).unsqueeze(1)
        weights = self.score(scores.tanh()).squeeze(-1).softmax(dim=-1)
        return weights @ values


class Decoder(nn.Module):
    """Decoder input [batch, target] and the encoder's output to logits [batch, target, words]."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.first = Layer(width, width, dropout, skip=False)
        self.attention = Attention(width)
        self.layers = nn.ModuleList(
            Layer(2 * width, width, dropout, skip=index > 0) for index in range(layers - 1)
        )
        self.project = nn.Linear(2 * width, vocabulary)

    def forward(self, read: Tensor, encoded: Tensor) -> Tensor:
        x = self.first(self.embed(read))
        context = self.attention(x, encoded)
        for layer in self.layers:
            x = layer(x, context)
        return self.project(torch.cat((x, context), dim=-1))


class Gnmt(nn.Module):
    """Source and decoder input, int64 [batch, length] each, to logits [batch, length, words]."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.encoder = Encoder(vocabulary, width, layers, dropout)
        self.decoder = Decoder(vocabulary, width, layers, dropout)

    def forward(self, source: Tensor, read: Tensor) -> Tensor:
        return self.decoder(read, self.encoder(source))


def model(
    vocabulary: int = 11, width: int = 64, layers: int = 3, dropout: float = 0.0
) -> nn.Module:
    """GNMT with `layers` encoder and `layers` decoder layers, at least 2.

    The published model has `vocabulary=32000, width=1024, layers=8, dropout=0.2`.
    """
    return Gnmt(vocabulary, width, layers, dropout)

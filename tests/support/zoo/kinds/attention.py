"""Attention and transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.specimens import Inputs, add, sequences, specimen, tokens


class Attending(nn.Module):
    """Self-attention of torch's own kind between two linear layers."""

    def __init__(self, mask: str = "", weights: bool = False, **options: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, **options)
        self.mask, self.weights = mask, weights

    def forward(self, x: Tensor) -> Any:
        h, mask = self.a(x), None
        if self.mask == "bool":
            mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        elif self.mask == "float":
            mask = torch.full((5, 5), float("-inf"), dtype=x.dtype).triu(1)
        out, weights = self.attention(h, h, h, attn_mask=mask, need_weights=self.weights)
        return (self.b(out), weights) if self.weights else self.b(out)


for _name, _options in {
    "plain": {},
    "with weights": {"weights": True},
    "boolean mask": {"mask": "bool"},
    "float mask": {"mask": "float"},
    "mask and weights": {"mask": "bool", "weights": True},
    "without bias": {"bias": False},
    "bias for keys, zero": {"add_bias_kv": True, "add_zero_attn": True, "weights": True},
    "other widths": {"kdim": 6, "vdim": 6},
}.items():
    add(_name, lambda options=_options: Attending(**options), sequences, kind="attention")  # type: ignore[misc]


def _padded(examples: int) -> Inputs:
    """The boolean mask is True where there is padding."""
    lengths = torch.tensor([5, 4, 3, 2][:examples])
    return (torch.randn(examples, 5, 6), torch.arange(5)[None] >= lengths[:, None]), {}


@specimen(_padded)
class KeyPadding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.b = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out, _ = self.attention(x, x, x, key_padding_mask=padding)
        return self.b(out)


def _encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2)


@specimen(_padded)
class EncoderPadded(nn.Module):
    """A stock encoder with a boolean padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.b = _encoder(), nn.Linear(6, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        # In eval mode torch's fast path leaves zeros at the padding.
        return self.b(self.encoder(x, src_key_padding_mask=padding)) * ~padding[..., None]


@specimen(sequences)
class EncoderCausal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = _encoder(norm_first=True, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=x.dtype)
        return self.encoder(x, mask=mask, is_causal=True)


add("encoder", _encoder, sequences, kind="attention")


@specimen(_padded, refused="depends on the data")
class Decoder(nn.Module):
    """A stock decoder with masks of both kinds; it looks whether its mask is a causal one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.decoder, self.begin = nn.TransformerDecoder(layer, 2), nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        causal = torch.ones(3, 3, dtype=torch.bool).triu(1)
        target = self.begin.expand(len(x), -1, -1)
        return self.decoder(target, x, tgt_mask=causal, memory_key_padding_mask=padding)


@specimen(sequences)
class Both(nn.Module):
    """nn.Transformer whole."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(6, 2, 1, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x, x.flip(1))


@specimen(sequences)
class Causal(nn.Module):
    """Written by hand, with one projection for all three."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.three, self.out = nn.LayerNorm(6), nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, 3)).transpose(1, 2)
            for part in self.three(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


@specimen(_padded)
class MaskedByHand(nn.Module):
    """Scores are filled in place, as code of old does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 6**0.5
        scores.masked_fill_(padding[:, None], float("-inf"))
        return scores.softmax(-1) @ self.v(x)


@specimen(sequences)
class GroupedQueries(nn.Module):
    """Fewer heads for keys than for queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 8), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (2, 2)).transpose(1, 2) for f in (self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(-2)


@specimen(tokens)
class LearnedPositions(nn.Module):
    """Words and positions, a block, and a head tied to the words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(12, 6), nn.Embedding(9, 6)
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        return F.linear(self.block(h), self.words.weight)


@specimen(sequences)
class RelativeBias(nn.Module):
    """A table of biases is indexed by a buffer, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.table = nn.Linear(6, 6), nn.Parameter(torch.randn(9))
        places = torch.arange(5)
        self.index = nn.Buffer(places[:, None] - places[None] + 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        scores = h @ h.transpose(1, 2) + self.table[self.index.view(-1)].view(5, 5)
        return scores.softmax(-1) @ h


@specimen(sequences, random=True)
def encoder_with_dropout() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


@specimen(sequences)
class Mixture(nn.Module):
    """Every expert computes all tokens; the router weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = (
            nn.Linear(6, 3),
            nn.ModuleList([nn.Linear(6, 6) for _ in range(3)]),
        )

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        outputs = torch.stack([torch.relu(expert(x)) for expert in self.experts], -1)
        return (outputs * shares[..., None, :]).sum(-1)


@specimen(sequences)
class MixtureOfTwo(nn.Module):
    """Of the three experts the two best count: a dense mixture, with a balance loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.up, self.down = nn.Parameter(torch.randn(3, 6, 4)), nn.Parameter(torch.randn(3, 4, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(-1)
        best, which = shares.topk(2, -1)
        weights = torch.zeros_like(shares).scatter(-1, which, best / best.sum(-1, keepdim=True))
        hidden = torch.relu(torch.einsum("bsd,edh->bseh", x, self.up))
        outputs = torch.einsum("bseh,ehd->bsed", hidden, self.down)
        balance = (shares.mean((0, 1)) * (weights > 0).to(x.dtype).mean((0, 1))).sum()
        return (outputs * weights[..., None]).sum(2), balance


@specimen(sequences, refused="depends on the data")
class MixtureByIndex(nn.Module):
    """Each expert gets the tokens that chose it: how many depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = (
            nn.Linear(6, 2),
            nn.ModuleList([nn.Linear(6, 6) for _ in range(2)]),
        )

    def forward(self, x: Tensor) -> Tensor:
        choice, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            which = choice == number
            out[which] = expert(x[which])
        return out

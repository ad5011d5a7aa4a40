"""Layers of torch, and how they are put together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.specimens import Inputs, add, between, pictures, sequences, specimen, tokens


def _pictured(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers)


PICTURED: dict[str, Any] = {
    "conv, grouped": lambda: _pictured(nn.Conv2d(4, 6, 3, groups=2), nn.Conv2d(6, 2, 1)),
    "conv, depthwise": lambda: _pictured(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 1)),
    "conv, dilated, reflected": lambda: _pictured(
        nn.Conv2d(4, 4, 3, dilation=2, padding=2, padding_mode="reflect"), nn.ReLU()
    ),
    "conv, strided, same": lambda: _pictured(
        nn.Conv2d(4, 4, 3, 2), nn.Conv2d(4, 4, 3, padding="same")
    ),
    "conv, transposed": lambda: _pictured(nn.ConvTranspose2d(4, 2, 3, 2, output_padding=1)),
    "pools": lambda: _pictured(
        nn.MaxPool2d(2),
        nn.AvgPool2d(3, 1, 1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 2),
    ),
    "pools, adaptive most": lambda: _pictured(nn.AdaptiveMaxPool2d(3), nn.LPPool2d(2, 2)),
    "upsampled": lambda: _pictured(
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.Upsample(size=5), nn.Conv2d(4, 2, 1)
    ),
    "bicubic": lambda: _pictured(nn.Upsample(size=(11, 11), mode="bicubic", align_corners=True)),
    "pixel shuffle": lambda: _pictured(
        nn.PixelShuffle(2), nn.Conv2d(1, 4, 3), nn.PixelUnshuffle(2)
    ),
    "group norm": lambda: _pictured(nn.GroupNorm(2, 4), nn.PReLU(4), nn.LocalResponseNorm(2)),
    "padded": lambda: _pictured(nn.ReflectionPad2d(1), nn.ReplicationPad2d(1), nn.CircularPad2d(1)),
    "unfold, fold": lambda: _pictured(nn.Unfold(2, stride=2), nn.Fold((8, 8), 2, stride=2)),
    "channels last": lambda: _pictured(nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last),
}
for _name, _make in PICTURED.items():
    add(_name, _make, pictures, kind="layers")

ACTIVATIONS = lambda: nn.Sequential(  # noqa: E731
    nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.SELU(), nn.Linear(6, 6), nn.Softplus(),
    nn.Linear(6, 6), nn.LogSigmoid(), nn.Linear(6, 12), nn.GLU(), nn.LayerNorm(6), nn.RMSNorm(6),
    nn.Softmin(-1), nn.Linear(6, 6), nn.LogSoftmax(-1), nn.Hardshrink(), nn.CELU(), nn.Tanhshrink(),
)  # fmt: skip
add("activations", ACTIVATIONS, kind="layers")


@specimen(lambda n: ((torch.randn(n, 3, 12),), {}))
def conv_1d() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.MaxPool1d(2))


@specimen(lambda n: ((torch.randn(n, 2, 4, 4, 4),), {}))
def conv_3d() -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 3, 3), nn.BatchNorm3d(3), nn.ReLU(), nn.AvgPool3d(2))


@specimen(pictures)
class UNet(nn.Module):
    """Two levels, with what skips concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(self.down(x))
        deep = torch.relu(self.deep(F.max_pool2d(skip, 2)))
        return self.out(torch.cat([skip, self.up(deep)], 1))


@specimen(pictures)
class DenseBlock(nn.Module):
    """Every layer reads all that came before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3 + 2 * k, 2, 3, padding=1) for k in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(torch.relu(layer(torch.cat(found, 1))))
        return torch.cat(found, 1)


@specimen(pictures)
class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.squeeze, self.excite = nn.Conv2d(3, 4, 3), nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        gate = self.excite(torch.relu(self.squeeze(h.mean((2, 3))))).sigmoid()
        return h * gate[:, :, None, None]


@specimen(pictures)
class MaxPoolIndices(nn.Module):
    """The places of the maxima cross to where they are used (SegNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h, places = F.max_pool2d(self.a(x), 2, return_indices=True)
        return self.b(F.max_unpool2d(torch.tanh(h), places, 2))


@specimen(pictures)
class SpatialTransformer(nn.Module):
    """An affine grid from a parameter, and samples on it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.place = nn.Conv2d(3, 4, 3), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        theta = 0.5 * torch.tanh(self.place(h.mean((2, 3)))).view(-1, 2, 3)
        grid = F.affine_grid(theta, [len(x), 4, 5, 5], align_corners=False)
        return F.grid_sample(h, grid, align_corners=False)


@specimen(tokens)
class PaddingIndex(nn.Module):
    """The row of the padding word gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.a = nn.Embedding(12, 6, padding_idx=0), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.words(x)).sum(1)


@specimen(tokens)
class ScaledByFrequency(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.a = nn.Embedding(12, 6, scale_grad_by_freq=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.tanh(self.words(x)))


@specimen(tokens, refused="writes into a parameter")
class MaxNorm(nn.Module):
    """Rows that are too long are cut in the table itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.a = nn.Embedding(12, 6, max_norm=1.0), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.tanh(self.words(x)))


@specimen(tokens)
class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.most = nn.EmbeddingBag(12, 6), nn.EmbeddingBag(12, 6, mode="max")
        self.a = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.cat([self.mean(x), self.most(x)], 1))


@specimen(tokens)
class BagWithOffsets(nn.Module):
    """Bags of other sizes than the input has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.a = nn.EmbeddingBag(12, 6, mode="sum"), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.words(x.flatten(), torch.arange(0, x.numel(), 7)))


@specimen(tokens)
class Adaptive(nn.Module):
    """Rare words have fewer dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.rare = nn.Embedding(6, 6), nn.Embedding(6, 3)
        self.widen = nn.Linear(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        rare = x >= 6
        often = self.often(x.clamp(max=5))
        return torch.where(rare[..., None], self.widen(self.rare((x - 6).clamp(min=0))), often)


def _pairs(examples: int) -> Inputs:
    return (torch.randn(examples, 6), torch.randn(examples, 6)), {}


@specimen(_pairs)
class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.near = nn.Bilinear(6, 6, 4), nn.CosineSimilarity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.both(x, y)) * self.near(x, y)[:, None]


@specimen(_pairs)
class TwoTowers(nn.Module):
    """Each with every other of the minibatch, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = F.normalize(self.a(x), dim=-1), F.normalize(self.b(y), dim=-1)
        logits = self.scale.exp() * one @ other.T
        labels = torch.arange(len(x))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


@specimen(lambda n: ((torch.randn(n, 12),), {}))
class Mixer(nn.Module):
    """Two halves of the features, the second of which is transposed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Linear(4, 4), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(-1, 3, 4)
        h = h + torch.tanh(self.columns(h.transpose(1, 2))).transpose(1, 2)
        return h + torch.tanh(self.rows(h))


@specimen()
class DictOfLayers(nn.Module):
    """Layers by name, called in the order of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {name: nn.Linear(6, 6) for name in ("b", "a", "c.d".replace(".", "_"))}
        )

    def forward(self, x: Tensor) -> Tensor:
        for name in sorted(self.layers):
            x = torch.tanh(self.layers[name](x))
        return x


@specimen(sequences)
class Convolved(nn.Module):
    """A causal, depthwise convolution and a gate, as in Mamba's block."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.conv = nn.Linear(6, 12), nn.Conv1d(6, 6, 3, groups=6, padding=2)
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.into(x).chunk(2, -1)
        h = F.silu(self.conv(h.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        return self.out(h * F.silu(gate))


@specimen(sequences)
class SelectiveScan(nn.Module):
    """A recurrence whose decay depends on the input, step by step (Mamba)."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.decay = nn.Linear(6, 6), nn.Parameter(torch.rand(6))
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        step = F.softplus(self.step(x))
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.exp(-step[:, t] * self.decay) * state + step[:, t] * x[:, t]
            states.append(state)
        return self.out(torch.stack(states, 1))


add("quantized", lambda: between(_FakeQuantized()), kind="layers")


class _FakeQuantized(nn.Module):
    """Weights and activations in 16 steps, with gradients straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.fake_quantize_per_tensor_affine(self.a.weight.float(), 0.1, 0, -8, 7)
        return F.linear(x, weight.to(x.dtype), self.a.bias)

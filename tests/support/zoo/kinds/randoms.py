"""Modules that draw random numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.specimens import between, pictures, sequences, specimen


@specimen(random=True)
def dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.2), nn.ELU()
    )


@specimen()
def dropout_of_nothing() -> nn.Module:
    return between(nn.Sequential(nn.Dropout(0.0), nn.Tanh(), nn.AlphaDropout(0.0)))


@specimen(random=True)
def dropout_in_place() -> nn.Module:
    return between(nn.Dropout(0.5, inplace=True))


@specimen(random=True)
def alpha_dropout() -> nn.Module:
    return between(nn.Sequential(nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)))


@specimen(pictures, random=True)
def dropout_of_channels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout2d(0.5), nn.Conv2d(4, 2, 3))


class Layers(nn.Module):
    """Two linear layers, for what is drawn in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError


@specimen(random=True)
class DropoutAlways(Layers):
    """Also in eval mode, as for Monte Carlo dropout."""

    def between(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.3, training=True)


@specimen(random=True)
class StochasticDepth(Layers):
    """Whole examples lose their branch."""

    def between(self, h: Tensor) -> Tensor:
        if not self.training:
            return h + h.tanh()
        kept = torch.rand(len(h), 1, dtype=h.dtype) < 0.7
        return h + h.tanh() * kept / 0.7


@specimen(random=True)
class GaussianNoise(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.randn_like(h) if self.training else h


@specimen(random=True)
class NormalInPlace(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.empty_like(h).normal_(1.0, 0.1)


@specimen(random=True)
class BernoulliInPlace(Layers):
    """By half, which torch leaves out as its default: in the last block of a ConvNeXt."""

    def between(self, h: Tensor) -> Tensor:
        return h * torch.empty_like(h).bernoulli_(0.5)


@specimen(random=True)
class Bernoulli(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.bernoulli(h.sigmoid())


@specimen(random=True)
class GumbelSoftmax(Layers):
    def between(self, h: Tensor) -> Tensor:
        return F.gumbel_softmax(h, hard=True)


@specimen(random=True)
class Variational(nn.Module):
    """A mean and a variance, and a sample by the reparametrization trick."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, -1)
        sample = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.decoder(sample), mean, spread


@specimen(random=True)
class RReLU(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.RReLU()

    def between(self, h: Tensor) -> Tensor:
        return self.act(h)


@specimen(random=True)
class Permuted(Layers):
    """The examples are mixed with each other in a drawn order, as in mixup."""

    def between(self, h: Tensor) -> Tensor:
        return 0.7 * h + 0.3 * h[torch.randperm(len(h))]


@specimen(random=True)
class RandomInteger(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.randint(1, 4, (len(h), 1))


@specimen(sequences, random=True)
class TokensMasked(Layers):
    """Tokens are replaced by a learned one where a draw says so."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.randn(6))

    def between(self, h: Tensor) -> Tensor:
        masked = torch.rand(h.shape[:2], dtype=h.dtype) < 0.4
        return torch.where(masked[..., None], self.mask, h)


@specimen(sequences, random=True)
class AttentionDropout(Layers):
    def between(self, h: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(h, h, h, dropout_p=0.4 if self.training else 0.0)


@specimen(random=True, refused="generator|random|differ")
class OwnGenerator(Layers):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def between(self, h: Tensor) -> Tensor:
        return h + torch.randn(h.shape, dtype=h.dtype, generator=self.generator)


@specimen(random=True)
class DropoutUnderNoGrad(Layers):
    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            mask = F.dropout(torch.ones_like(h), 0.5, self.training)
        return h * mask


@specimen(random=True, refused="random|differ|determin")
class PythonDice(Layers):
    """Python's own dice decide which layers run (layer drop)."""

    def between(self, h: Tensor) -> Tensor:
        import random

        return h.tanh() if random.random() < 0.5 else h

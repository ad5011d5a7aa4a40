"""Parameters that several places use."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from zoo.specimens import add, between, sequences, specimen, tokens


@specimen(tokens)
class Language(nn.Module):
    """The head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.a = nn.Embedding(12, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.a(self.words(x))))


@specimen(tokens)
class LanguageWithoutHead(nn.Module):
    """The weight of the embedding is used by a function, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.a = nn.Embedding(12, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(self.words(x))) @ self.words.weight.T


@specimen()
class AutoEncoder(nn.Module):
    """The decoder has the transposed weight of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bias = nn.Linear(6, 3), nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.T, self.bias)


@specimen()
class SharedLayer(nn.Module):
    """A layer that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.a(x))
        return self.b(x)


@specimen()
class SharedInList(nn.Module):
    """A module stands twice in a list, under two names."""

    def __init__(self) -> None:
        super().__init__()
        one, other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.layers = nn.ModuleList([one, other, one, other, one])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@specimen()
def tied_and_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[4].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    return model


@specimen()
def tied_bias() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[4].bias = model[0].bias
    return model


@specimen()
class ParameterTwice(nn.Module):
    """One scale for two places far apart, and a power of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x * self.scale))) * self.scale**2


@specimen(sequences)
class Albert(nn.Module):
    """All blocks share their weights, and so do their norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x


@specimen()
def weight_norm() -> nn.Module:
    return between(parametrizations.weight_norm(nn.Linear(6, 6)))


@specimen()
def weight_norm_of_old() -> nn.Module:
    return between(nn.utils.weight_norm(nn.Linear(6, 6)))


@specimen()
def spectral_norm() -> nn.Module:
    """Its power iteration changes buffers in training."""
    return between(parametrizations.spectral_norm(nn.Linear(6, 6)))


@specimen()
def spectral_norm_of_old() -> nn.Module:
    return between(nn.utils.spectral_norm(nn.Linear(6, 6)))


@specimen()
def orthogonal() -> nn.Module:
    return between(parametrizations.orthogonal(nn.Linear(6, 6)))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


@specimen()
def parametrized() -> nn.Module:
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return between(layer)


@specimen()
class ParameterLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.some = nn.ParameterList([torch.randn(6, 6) / 3 for _ in range(3)])
        self.more = nn.ParameterDict({"scale": torch.ones(6), "shift": torch.zeros(6)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.some:
            x = torch.tanh(x @ weight)
        return x * self.more["scale"] + self.more["shift"]


@specimen()
class Unused(nn.Module):
    """A layer that no forward pass calls learns nothing, and is not decayed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.idle = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@specimen()
class NoGradient(nn.Module):
    """A parameter that is used, but has no part in the loss: none, not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gate = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (self.gate(x) > 0).to(x.dtype)
        return self.b(torch.tanh(self.a(x)) * chosen)


@specimen()
class Generated(nn.Module):
    """A hyper-network: the weight of one layer comes from another."""

    def __init__(self) -> None:
        super().__init__()
        self.latent, self.make = nn.Parameter(torch.randn(4)), nn.Linear(4, 36)
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.a(x)), self.make(self.latent).view(6, 6))


@specimen(refused="its code has a name that torch.fx needs itself")
class NamedAsInFx(nn.Module):
    """A captured model has attributes of its own, which its parameters must not replace."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.graph = nn.Parameter(torch.randn(6)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.graph(x * self.code)


@specimen()
class LowRank(nn.Module):
    """A frozen weight with a low-rank part that learns, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.a.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) + x @ self.down.T @ self.up.T))


add(
    "three heads on one trunk",
    lambda: _Heads(),
    kind="ties",
)


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(6, 6), nn.ModuleList([nn.Linear(6, 2) for _ in range(3)])

    def forward(self, x: Tensor) -> list[Tensor]:
        h = torch.tanh(self.trunk(x))
        return [head(h) for head in self.heads]

"""Small models with data, for runs whose stages are on meshes; run configs name what is here."""

from __future__ import annotations

import torch
import user_operators  # noqa: F401 - Gated's, which are in torch.ops then
from joint_models import (
    LENGTH,
    WORDS,
    FusedAttention,
    SeparateAttention,
    TinyVGG,
    Transformer,
    narrow_resnet,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


class Perceptron(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
        )


class _Language(Transformer):
    """Gives the logits; the loss is in the run config."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Fused(_Language):
    def __init__(self) -> None:
        super().__init__(FusedAttention, layers=1)


class Separate(_Language):
    def __init__(self) -> None:
        super().__init__(SeparateAttention, layers=1)


class TiedWords(_Language):
    """The weight of its embedding is that of its head. Without dropout, to compare with a loop."""

    def __init__(self) -> None:
        super().__init__(FusedAttention, layers=1)
        self.head.weight = self.words.weight
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0


class FrozenWords(TiedWords):
    def __init__(self) -> None:
        super().__init__()
        self.words.weight.requires_grad_(False)


class VGG(TinyVGG):
    """As it is, with dropout."""


class Convolutions(nn.Sequential):
    """With batch norms of pictures, one of which learns nothing, and one of rows."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
            *(nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8, affine=False), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(200, 12), nn.BatchNorm1d(12), nn.Linear(12, 10)),
        )


def Grouped() -> nn.Module:  # noqa: N802 - a model of its own, as the classes
    """transformers' Llama, with two heads of keys and values for four of queries. Its norms, which
    compute in float32 whatever the model does, are torch's: else no last digit would stay.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))
    for module in model.modules():
        for name, child in module.named_children():
            if name.endswith("norm"):
                setattr(module, name, nn.RMSNorm(16, eps=child.variance_epsilon))
    return Logits(model)


class Recurrent(nn.Module):
    """Two layers, there and back."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.up, self.head = nn.Linear(16, 12), nn.Linear(12, WORDS)
        self.layers = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.up(self.layers(self.words(tokens))[0]).tanh())
        return logits


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


class Recommender(nn.Module):
    """Two towers over embeddings of who and what, and how well they go together."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = (self._tower(count) for count in (40, 24))

    def _tower(self, count: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Embedding(count, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8)
        )

    def forward(self, pairs: Tensor) -> Tensor:
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1)


def clicks(scores: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, target.to(scores.dtype))


def pairs(examples: int = 42) -> tuple[TensorDataset, TensorDataset]:
    drawn = _generator()
    x = torch.stack([torch.randint(0, n, (examples,), generator=drawn) for n in (40, 24)], 1)
    return _halves(x, (x.sum(1) % 3 == 0).float())


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 64), nn.Linear(6, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.ops.user_operators.gated(self.up(x), self.gate(x)))
        return result


def resnet18() -> nn.Module:
    return narrow_resnet()


def large_resnet18() -> nn.Module:
    """For pictures that leave more than one place in the last layers."""
    return narrow_resnet()


def next_words(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def rounded_down(output: Tensor, target: Tensor) -> Tensor:
    """Looks at values, so it cannot be part of a stage's passes."""
    loss = F.cross_entropy(output, target)
    return loss * 0.5 if loss.item() < 1.0 else loss


def sentences(examples: int = 42) -> tuple[TensorDataset, TensorDataset]:
    x = torch.randint(0, WORDS, (examples, LENGTH + 1), generator=_generator())
    return _halves(x[:, :-1], x[:, 1:])


def images(size: int, examples: int = 42) -> tuple[TensorDataset, TensorDataset]:
    x = torch.randn(examples, 3, size, size, generator=_generator())
    return _halves(x, torch.randint(0, 10, (examples,), generator=_generator()))


def points(examples: int = 42) -> tuple[TensorDataset, TensorDataset]:
    x = torch.randn(examples, 6, generator=_generator())
    return _halves(x, x[:, :3].argmax(1))


class Rising:
    """A loss that weighs more with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, target) * min(1.0, self.calls / 6)


def vectors(examples: int = 42) -> tuple[TensorDataset, TensorDataset]:
    x = torch.randn(examples, 6, generator=_generator())
    return _halves(x, x[:, :3].tanh())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _halves(x: Tensor, y: Tensor) -> tuple[TensorDataset, TensorDataset]:
    """Six are held out."""
    return TensorDataset(x[:-6], y[:-6]), TensorDataset(x[-6:], y[-6:])

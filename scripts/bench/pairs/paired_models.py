"""Ten small models of others and of no one, that nothing here was fitted to, and their examples.

pd-train finds them by name: `paired_models:make` and `paired_models:examples`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipedream.capture.errors.user_code import import_torchvision

WORDS, LENGTH, CLASSES, SIDE = 2_000, 48, 10, 64
Examples = Sequence[Any]


@dataclass(frozen=True)
class Paired:
    """`make()` is the model, `examples(count)` its data, `loss` as a run config names it; a
    minibatch has `batch_size` of them.
    """

    make: Callable[[], nn.Module]
    examples: Callable[[int], Examples]
    loss: str
    batch_size: int


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name].make()


def examples(name: str, count: int) -> tuple[Examples, None]:
    return MODELS[name].examples(count), None


def library(name: str) -> Any:
    import_torchvision()  # where torch is a build without its operators, others fail to import it
    return importlib.import_module(name)


def _torchvision(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(library("torchvision.models"), name)(num_classes=CLASSES, **sizes)


def _timm(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: library("timm").create_model(name, num_classes=CLASSES, **sizes)


def _transformers(kind: str, head: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make_one() -> nn.Module:
        hf = library("transformers")
        hf.logging.set_verbosity_error()
        model: nn.Module = getattr(hf, f"{kind}{head}")(getattr(hf, f"{kind}Config")(**sizes))
        return model

    return make_one


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def images(count: int) -> Examples:
    draw = _generator()
    pixels = torch.randn(count, 3, SIDE, SIDE, generator=draw)
    return list(zip(pixels, torch.randint(0, CLASSES, (count,), generator=draw), strict=True))


def sentences(count: int) -> Examples:
    words = torch.randint(2, WORDS, (count, LENGTH), generator=_generator())
    return [{"input_ids": own, "labels": own} for own in words]


def ratings(count: int) -> Examples:
    """What a user and an item look like, and how well they suit each other."""
    pairs = torch.randn(count, 2, 256, generator=_generator())
    return list(zip(pairs, (pairs[:, 0] * pairs[:, 1]).mean(-1, keepdim=True), strict=True))


def sounds(count: int) -> Examples:
    """Frames of a spectrum, with a class for each."""
    draw = _generator()
    frames = torch.randn(count, 64, 40, generator=draw)
    return list(zip(frames, torch.randint(0, CLASSES, (count, 64), generator=draw), strict=True))


def of_frames(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class TwoTowers(nn.Module):
    """Two towers [batch, 2, 256] -> [batch, 1] that meet in a product."""

    def __init__(self, width: int = 1_024, layers: int = 3) -> None:
        super().__init__()
        self.towers = nn.ModuleList(_tower(width, layers) for _ in range(2))

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = (tower(pairs[:, n]) for n, tower in enumerate(self.towers))
        return (user * item).mean(-1, keepdim=True)


def _tower(width: int, layers: int) -> nn.Module:
    parts: list[nn.Module] = [nn.Linear(256, width)]
    for _ in range(layers):
        parts += [nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width)]
    return nn.Sequential(*parts)


class Speech(nn.Module):
    """Convolutions over time, then an encoder: frames [batch, 64, 40] -> logits of each."""

    def __init__(self, width: int = 192, layers: int = 4) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(40, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 5, padding=2)
        )
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, frames: Tensor) -> Tensor:
        return self.head(self.encoder(self.front(frames.transpose(1, 2)).transpose(1, 2)))


_SMALL = {"vocab_size": WORDS, "max_position_embeddings": 64}

MODELS: dict[str, Paired] = {
    "regnet": Paired(_torchvision("regnet_y_400mf"), images, "cross_entropy", 8),
    "shufflenet": Paired(_torchvision("shufflenet_v2_x1_0"), images, "cross_entropy", 16),
    "squeezenet": Paired(_torchvision("squeezenet1_1"), images, "cross_entropy", 16),
    "mixer": Paired(
        _timm("mixer_s32_224", img_size=SIDE, num_blocks=4), images, "cross_entropy", 16
    ),
    "convnext": Paired(_timm("convnext_atto"), images, "cross_entropy", 8),
    "distilbert": Paired(
        _transformers(
            "DistilBert",
            "ForMaskedLM",
            dim=256,
            n_heads=4,
            n_layers=4,
            hidden_dim=1_024,
            dropout=0.0,
            attention_dropout=0.0,
            **_SMALL,
        ),
        sentences,
        "output",
        8,
    ),
    "opt": Paired(
        _transformers(
            "OPT",
            "ForCausalLM",
            hidden_size=256,
            num_hidden_layers=4,
            ffn_dim=1_024,
            num_attention_heads=4,
            word_embed_proj_dim=256,
            dropout=0.0,
            **_SMALL,
        ),
        sentences,
        "output",
        8,
    ),
    "qwen": Paired(
        _transformers(
            "Qwen2",
            "ForCausalLM",
            hidden_size=256,
            num_hidden_layers=4,
            intermediate_size=768,
            num_attention_heads=4,
            num_key_value_heads=2,
            **_SMALL,
        ),
        sentences,
        "output",
        8,
    ),
    "two towers": Paired(TwoTowers, ratings, "mse_loss", 64),
    "speech": Paired(Speech, sounds, "paired_models:of_frames", 8),
}

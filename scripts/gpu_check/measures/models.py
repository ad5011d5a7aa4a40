"""The models that are measured, and made-up data for them: named in run configs as
gpu_check.measures.models:NAME.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from pipedream.capture.errors.user_code import import_torchvision

_STILL = 1e-9  # a learning rate with which one minibatch can be learned again and again
_EXAMPLES = 64

WORDS = 50_257


class GPT2(nn.Module):
    """The smallest GPT-2 of transformers: tokens [batch, length] to logits of each word. Its head
    has weights of its own: shared ones would keep two stages from training without a flush.
    """

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        import_torchvision()  # transformers imports it, and it may not fit this torch
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=heads,
            use_cache=False,
            tie_word_embeddings=False,
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits
        return logits


def sentences(length: int) -> tuple[TensorDataset, None]:
    """A word is the target of the one before it."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, WORDS, (_EXAMPLES, length + 1), generator=generator)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:].contiguous()), None


def next_words(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def pictures(side: int) -> tuple[TensorDataset, None]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_EXAMPLES, 3, side, side, generator=generator)
    return TensorDataset(x, torch.randint(0, 1_000, (_EXAMPLES,), generator=generator)), None


def perceptron(width: int = 64) -> nn.Module:
    parts = (part for _ in range(4) for part in (nn.Linear(width, width), nn.Tanh()))
    return nn.Sequential(*parts)


def points(examples: int = 64, width: int = 64) -> tuple[TensorDataset, None]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, width, generator=generator)
    return TensorDataset(x, x.roll(1, dims=1)), None


class Repeated(Dataset[Any]):
    """An epoch that has each example of `data` so many times."""

    def __init__(self, data: TensorDataset, times: int) -> None:
        self.data, self.times = data, times

    def __len__(self) -> int:
        return len(self.data) * self.times

    def __getitem__(self, index: int) -> Any:
        return self.data[index % len(self.data)]


def repeated(source: str, times: int, **args: Any) -> tuple[Repeated, None]:
    """The data of `sentences` or `pictures`, so many times."""
    data, _ = globals()[source](**args)
    return Repeated(data, times), None


def configs(small: bool) -> dict[str, dict[str, Any]]:
    """Returns the run configs by the names of the models; `small`: of a size for a CPU."""
    here = "gpu_check.measures.models"
    language = {"layers": 2, "width": 32, "heads": 2} if small else {}
    vision = "torchvision:resnet18" if small else "torchvision:resnet50"
    length, side = (8, 32) if small else (256, 224)
    return {
        "gpt2": {
            "model": {"source": f"{here}:GPT2", "args": language},
            "data": {
                "source": f"{here}:repeated",
                "args": {"source": "sentences", "times": 4 if small else 16, "length": length},
            },
            "loss": f"{here}:next_words",
            "optimizer": {"name": "AdamW", "args": {"lr": _STILL}},
            "batch_size": 4 if small else 16,
        },
        "resnet50": {
            "model": {"source": vision},
            "data": {
                "source": f"{here}:repeated",
                "args": {"source": "pictures", "times": 4 if small else 16, "side": side},
            },
            "loss": "cross_entropy",
            "optimizer": {"name": "SGD", "args": {"lr": _STILL, "momentum": 0.9}},
            "batch_size": 4 if small else 64,
        },
        "perceptron": {
            "model": {"source": f"{here}:perceptron"},
            "data": {"source": f"{here}:points"},
            "loss": "mse_loss",
            "optimizer": {"name": "AdamW", "args": {"lr": 0.01}},
            "batch_size": 4,
            "dtype": "float64",
        },
    }

"""What models take and return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

from zoo.specimens import Inputs, sequences, specimen, tokens, vectors


class Layers(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)


@specimen()
class Several(Layers):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return self.b(h), h


@specimen()
class Mapping(Layers):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return {"logits": self.b(h), "features": {"hidden": h}}


@dataclass
class Result(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    states: tuple[Tensor, ...] | None = None


@specimen()
class HuggingFaces(Layers):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return Result(logits=self.b(h), states=(h, x))


@dataclass
class Pair:
    one: Tensor
    other: Tensor


@specimen(refused="register_dataclass")
class Dataclass(Layers):
    """A dataclass that torch does not know."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return Pair(self.b(h), h)


@dataclass
class KnownPair:
    one: Tensor
    other: Tensor


pytree.register_dataclass(KnownPair)


@specimen()
class DataclassRegistered(Layers):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return KnownPair(self.b(h), h)


class NamedPair(NamedTuple):
    one: Tensor
    other: Tensor


@specimen()
class NamedTuples(Layers):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return NamedPair(self.b(h), h)


@specimen()
class Nones(Layers):
    def forward(self, x: Tensor) -> Any:
        return None, self.b(torch.tanh(self.a(x))), (None, [x.sum()])


@specimen()
class Nested(Layers):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return [(self.b(h), {"h": [h, h * 2]}), {"x": (x,)}]


@specimen()
class Scalar(Layers):
    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(self.a(x))).square().mean()


@specimen()
class SameTwice(Layers):
    """One tensor in two places: its gradients add up."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(torch.tanh(self.a(x)))
        return h, h, h + 0


@specimen()
class Integers(Layers):
    """Outputs of integers and booleans, and a plain number."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(torch.tanh(self.a(x)))
        return h, h.argmax(-1), h > 0, 3, "text"


@specimen()
class Strings(Layers):
    def forward(self, x: Tensor) -> Any:
        return {"kind": "logits", "value": self.b(self.a(x)), "scale": 0.5, "on": True}


def _keywords(examples: int) -> Inputs:
    return (), {"left": torch.randn(examples, 6), "right": torch.randn(examples, 6)}


@specimen(_keywords)
class Keywords(Layers):
    def forward(self, *, left: Tensor, right: Tensor) -> Any:
        return self.b(self.a(left) * torch.tanh(self.a(right)))


def _keywords_in_other_order(examples: int) -> Inputs:
    return (torch.randn(examples, 6),), {
        "right": torch.randn(examples, 6),
        "left": torch.randn(examples, 6),
    }


@specimen(_keywords_in_other_order)
class KeywordsInOtherOrder(Layers):
    """Given in another order than the parameters of forward have."""

    def forward(self, x: Tensor, left: Tensor, right: Tensor) -> Any:
        return self.b(self.a(x + left - 2 * right) * torch.tanh(self.a(right)))


def _pair(examples: int) -> Inputs:
    return ({"x": torch.randn(examples, 6), "more": [torch.randn(examples, 6)]},), {}


@specimen(_pair)
class InputsNested(Layers):
    def forward(self, batch: dict[str, Any]) -> Any:
        return self.b(torch.tanh(self.a(batch["x"])) + batch["more"][0])


def _with_number(examples: int) -> Inputs:
    return (torch.randn(examples, 6), 2, True), {"scale": 0.5, "mode": "tanh", "mask": None}


@specimen(_with_number)
class PlainValues(Layers):
    """Numbers, words and None among the inputs."""

    def forward(self, x: Tensor, power: int, on: bool, scale: float, mode: str, mask: Any) -> Any:
        h = self.a(x).pow(power) * scale if on else x
        return self.b(torch.tanh(h) if mode == "tanh" and mask is None else h)


def _whole(examples: int) -> Inputs:
    return (torch.randint(0, 12, (examples, 7)), torch.randint(0, 3, (examples, 7))), {}


@specimen(_whole)
class SeveralIntegers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.types = nn.Embedding(12, 6), nn.Embedding(3, 6)
        self.a = nn.Linear(6, 2)

    def forward(self, x: Tensor, kinds: Tensor) -> Any:
        return self.a(torch.tanh(self.words(x) + self.types(kinds)))


@specimen(_with_unused := lambda n: ((torch.randn(n, 6), torch.randn(n, 3)), {}))
class UnusedInput(Layers):
    def forward(self, x: Tensor, other: Tensor) -> Any:
        return self.b(torch.tanh(self.a(x)))


@specimen(lambda n: ((torch.randn(n, 6), torch.rand(n, 6) > 0.3), {}))
class BooleanMask(Layers):
    """The mask is read by the first layer and the last."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        h = self.a(x).masked_fill(~mask, 0.0)
        return self.b(torch.tanh(h)) * mask.any(1, keepdim=True)


@specimen(lambda n: ((), {}))
class NoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 6)), nn.Linear(6, 6)

    def forward(self) -> Any:
        return self.b(torch.tanh(self.a))


def _twice(examples: int) -> Inputs:
    x = torch.randn(examples, 6)
    return (x, x), {}


@specimen(_twice)
class SameInputTwice(Layers):
    def forward(self, x: Tensor, again: Tensor) -> Any:
        return self.b(torch.tanh(self.a(x)) * again)


def _labelled(examples: int) -> Inputs:
    (x,), _ = vectors(examples)
    return (x,), {"labels": torch.randint(0, 4, (examples,))}


@specimen(_labelled)
class LossInside(Layers):
    """The model computes its own loss, as Hugging Face's do."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.b(torch.tanh(self.a(x)))
        return Result(loss=F.cross_entropy(logits, labels), logits=logits.detach())


def _causal(examples: int) -> Inputs:
    words = torch.randint(0, 12, (examples, 7))
    return (words,), {"labels": words}


@specimen(_causal)
class LanguageLoss(nn.Module):
    """Labels are the tokens, moved by one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(12, 6), nn.Linear(6, 12)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.head(torch.tanh(self.words(x)))
        ahead = logits[:, :-1].contiguous().view(-1, 12)
        return F.cross_entropy(ahead, labels[:, 1:].contiguous().view(-1))


@specimen(sequences)
class SizesOfInput(Layers):
    """Shapes are read from the input, and put to use."""

    def forward(self, x: Tensor) -> Any:
        examples, steps, width = x.shape
        h = self.a(x.reshape(examples * steps, width)).view(examples, steps, -1)
        return self.b(h / steps) + torch.arange(steps, dtype=x.dtype)[None, :, None]


@specimen(tokens)
class OneHot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.a(F.one_hot(x, 12).to(self.a.weight.dtype)))


@specimen(refused="runs no operator|nothing")
class Identity(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x

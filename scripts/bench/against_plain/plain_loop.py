"""The same training in a plain loop of PyTorch, in one process, and what it varies by.

Nothing of pipedream is in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

SEED, LEARNING_RATE, MOMENTUM = 5, 0.05, 0.9
PRECISIONS = ("float32", "bfloat16", "float64")
"""bfloat16: weights in float32, operators under autocast."""
FURTHER = ("float16", "whole-bfloat16")
"""For pd-train: weights in float32, operators under autocast; all in bfloat16."""
AUTOCAST = ("bfloat16", "float16")
SCALES = {"float16": 1024.0}
"""Factors on the loss, without which gradients of small numbers would vanish."""


@dataclass(frozen=True)
class Microbatch:
    """The examples from `begin` to `end`; their mean loss has this `part` in that of the update."""

    begin: int
    end: int
    part: float = 1.0


Update = Sequence[Sequence[Microbatch]]
"""The minibatches of an update, each as the microbatches that it is computed in."""


@dataclass
class Learnt:
    """The loss of each minibatch, and by parameter the gradient of the first update. `unit`: what
    numbers of the type of the losses are apart, next to 1.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    unit: float = torch.finfo(torch.float32).eps


def weights_dtype(precision: str) -> torch.dtype:
    types = {"float64": torch.float64, "whole-bfloat16": torch.bfloat16}
    return types.get(precision, torch.float32)


def make_model(make: Callable[[], nn.Module], precision: str) -> nn.Module:
    torch.manual_seed(SEED)
    return make().to(weights_dtype(precision)).train()


def collated(examples: Sequence[Any], precision: str) -> Any:
    """A minibatch; what is not whole numbers has the type of the weights."""

    def cast(x: Tensor) -> Tensor:
        return x.to(weights_dtype(precision)) if x.is_floating_point() else x

    return pytree.tree_map_only(Tensor, cast, default_collate(list(examples)))


def loss_of(
    model: nn.Module, batch: Any, loss: Callable[[Tensor, Tensor], Tensor] | None
) -> Tensor:
    """By the model itself if there is no `loss`."""
    if loss is None:
        value: Tensor = model(**batch).loss
        return value
    x, y = batch
    return loss(model(x), y)


def train_plain(
    model: nn.Module,
    examples: Sequence[Any],
    loss: Callable[[Tensor, Tensor], Tensor] | None,
    updates: Sequence[Update],
    precision: str,
    rounding: TorchDispatchMode | None = None,
) -> Learnt:
    """The loss of an update is the mean over its minibatches."""
    learnt = Learnt()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    lowered = precision in AUTOCAST
    lower = torch.autocast("cpu", getattr(torch, precision)) if lowered else nullcontext()
    scale = SCALES.get(precision, 1.0)
    with rounding or nullcontext():
        for update in updates:
            optimizer.zero_grad()
            for minibatch in update:
                value = 0.0
                for piece in minibatch:
                    batch = collated(examples[piece.begin : piece.end], precision)
                    with lower:
                        piece_loss = loss_of(model, batch, loss)
                    (piece_loss * scale * piece.part / len(update)).backward()
                    value += piece_loss.item() * piece.part
                    learnt.unit = torch.finfo(piece_loss.dtype).eps
                learnt.losses.append(value)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= scale
            if not learnt.gradients:
                learnt.gradients = {
                    name: parameter.grad.clone()
                    for name, parameter in model.named_parameters()
                    if parameter.grad is not None
                }
            optimizer.step()
    return learnt


class RoundedOtherwise(TorchDispatchMode):
    """Each number that an operator computes is moved by up to half a unit in its last place, at
    random: what another order of sums, or another kernel, might have done to it. Whole numbers,
    such as counts and masks, stay.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        computes = any(isinstance(arg, Tensor) for arg in args)
        aliases = any(each.alias_info is not None for each in function._schema.returns)
        if not computes or aliases or function.overloadpacket in _EXACT:
            return results
        return pytree.tree_map_only(Tensor, self._moved, results)

    def _moved(self, result: Tensor) -> Tensor:
        if not result.is_floating_point() or result.numel() == 0:
            return result
        most = torch.finfo(result.dtype).eps / 2
        noise = torch.empty_like(result).uniform_(-most, most, generator=self.draw)
        moved = torch.addcmul(result, result, noise)
        return result.copy_(torch.where(result == result.round(), result, moved))


_ATEN = torch.ops.aten
_EXACT = {
    *(_ATEN.clone, _ATEN.cat, _ATEN.stack, _ATEN.repeat, _ATEN.constant_pad_nd, _ATEN.embedding),
    *(_ATEN.index, _ATEN.index_select, _ATEN.gather, _ATEN.where, _ATEN.masked_fill),
    *(_ATEN.neg, _ATEN.relu, _ATEN.slice_backward, _ATEN.select_backward),
    _ATEN.max_pool2d_with_indices,
}
"""They choose and move numbers, and compute none."""


@dataclass(frozen=True)
class Reference:
    """What the plain loop learns, and the same loop rounded otherwise, several times."""

    plain: Learnt
    others: Sequence[Learnt]

    def parts(self, found: Learnt) -> tuple[float, float]:
        """The largest difference of `found` from the plain loop, of losses and of gradients, as
        parts of what is allowed.
        """
        return self._loss_part(found.losses), self._gradient_part(found.gradients)

    def _loss_part(self, found: Sequence[float]) -> float:
        """A loss may differ by `FACTOR` times the most that it, or one before it, varies by."""
        if len(found) != len(self.plain.losses):
            return float("inf")
        varies, worst = 0.0, 0.0
        for number, expected in enumerate(self.plain.losses):
            moved = (abs(other.losses[number] - expected) for other in self.others)
            varies = max(varies, *moved, self.plain.unit * abs(expected))
            worst = _larger(worst, abs(found[number] - expected) / (FACTOR * varies))
        return worst

    def _gradient_part(self, found: Mapping[str, Tensor]) -> float:
        """Likewise the gradient of each parameter, in its norm."""
        expected = self.plain.gradients
        if extra := found.keys() - expected.keys():
            found = {**found}
            if any(found.pop(name).abs().max() > 0 for name in extra):
                return float("inf")
        whole = float(sum(g.double().square().sum() for g in expected.values()) ** 0.5)
        worst = 0.0
        for name, gradient in expected.items():
            own = found.get(name, torch.zeros_like(gradient))
            moved = (_norm(other.gradients[name] - gradient) for other in self.others)
            least = torch.finfo(gradient.dtype).eps * max(_norm(gradient), whole / 1000)
            worst = _larger(worst, _norm(own - gradient) / (FACTOR * max(*moved, least)))
        return worst


FACTOR = 4.0
"""So many times what the plain loop varies by is allowed."""
RULE = (
    f"allowed is {FACTOR:g} times the largest difference between the plain loop and {{reruns}} "
    "reruns of it in which each number that an operator computes, but for whole ones, is moved at "
    "random by up to half a unit in the last place of its type: of each loss, that of the losses "
    "before it included, and of the gradient of each parameter, in its norm; at least "
    f"{FACTOR:g} units in the last place"
)


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def _larger(one: float, other: float) -> float:
    """NaN is larger than all."""
    return other if other > one or other != other else one


def reference(
    make: Callable[[], nn.Module],
    examples: Sequence[Any],
    loss: Callable[[Tensor, Tensor], Tensor] | None,
    updates: Sequence[Update],
    precision: str,
    reruns: int,
) -> Reference:
    def run(rounding: TorchDispatchMode | None) -> Learnt:
        model = make_model(make, precision)
        return train_plain(model, examples, loss, updates, precision, rounding)

    plain, *others = [run(RoundedOtherwise(n) if n else None) for n in range(reruns + 1)]
    return Reference(plain, others)

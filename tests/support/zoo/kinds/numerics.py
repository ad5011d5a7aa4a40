"""Losses, linear algebra, sorting, sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.specimens import Inputs, add, sequences, specimen


class Layers(nn.Module):
    """Two linear layers, for what is computed in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.between(self.a(x)))

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError


def _square(h: Tensor) -> Tensor:
    """Well-conditioned, symmetric, one for each example."""
    part = h.view(-1, 2, 3)
    return part.transpose(1, 2) @ part + 2 * torch.eye(3, dtype=h.dtype)


class Algebra(Layers):
    """Linear algebra on matrices made of each example."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.c = nn.Linear(9, 6)

    def between(self, h: Tensor) -> Tensor:
        return self.c(self.function(_square(h)).expand(-1, 3, 3).flatten(1))


for _name, _function in {
    "solve": lambda m: torch.linalg.solve(m, m.transpose(1, 2) @ m + m),
    "cholesky": torch.linalg.cholesky,
    "inverse": torch.linalg.inv,
    "determinant": lambda m: torch.linalg.det(m)[:, None, None],
    "log determinant": lambda m: torch.linalg.slogdet(m)[1][:, None, None],
    "singular values": lambda m: torch.linalg.svdvals(m)[:, None],
    "eigenvalues": lambda m: torch.linalg.eigvalsh(m)[:, None],
    "qr": lambda m: torch.linalg.qr(m)[1],
    "exponential": lambda m: torch.matrix_exp(m / 10),
    "pseudo-inverse": torch.linalg.pinv,
    "triangular": lambda m: torch.linalg.solve_triangular(m.tril(), m, upper=False),
    "norms": lambda m: (
        torch.linalg.norm(m, dim=2, keepdim=True) + torch.linalg.matrix_norm(m)[:, None, None]
    ),
    "powers": lambda m: torch.linalg.matrix_power(m / 5, 3),
}.items():
    add(_name, lambda function=_function: Algebra(function), kind="numerics")  # type: ignore[misc]


class Between(Layers):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def between(self, h: Tensor) -> Tensor:
        return self.function(h)


for _name, _function in {
    "cumsum": lambda h: h.cumsum(1),
    "cumprod": lambda h: h.tanh().cumprod(1),
    "cummax": lambda h: h.cummax(1).values,
    "logcumsumexp": lambda h: torch.logcumsumexp(h, 1),
    "sort": lambda h: h.sort(1).values,
    "argsort, gather": lambda h: h.gather(1, h.detach().argsort(1)),
    "topk": lambda h: torch.cat((*h.topk(3, 1)[:1], h[:, :3]), 1),
    "median": lambda h: h - h.median(1, keepdim=True).values,
    "kthvalue": lambda h: h / h.abs().kthvalue(2, 1, keepdim=True).values,
    "max": lambda h: h * h.max(1, keepdim=True).values,
    "amax, ties": lambda h: h + h.relu().amin(1, keepdim=True),
    "quantile": lambda h: h - h.quantile(0.3, 1, keepdim=True),
    "variance": lambda h: h / (h.var(1, keepdim=True) + h.std(1, keepdim=True) + 1),
    "logsumexp": lambda h: h - h.logsumexp(1, keepdim=True),
    "softmax": lambda h: h.softmax(1) * h.log_softmax(-1),
    "einsum": lambda h: torch.einsum("bi,bj,bj->bi", h, h, h.tanh()),
    "outer": lambda h: torch.bmm(h[:, :, None], h[:, None]).mean(2),
    "distances": lambda h: torch.cdist(h, h.detach() + 1) @ h,
    "histogram": lambda h: h * torch.histc(h.detach(), 6, -1, 1),
    "buckets": lambda h: h * torch.bucketize(h.detach(), torch.linspace(-1, 1, 5)),
    "bincount": lambda h: h + torch.bincount(h.detach().argmax(1), minlength=6),
    "renorm": lambda h: F.normalize(h, dim=1) + h.renorm(2, 0, 1.0),
    "roots": lambda h: h.abs().add(0.1).sqrt() + h.square().add(1).rsqrt() + h.sigmoid().logit(),
    "special": lambda h: torch.special.gammaln(h.abs() + 1) + torch.erf(h) + torch.special.i0(h),
    "remainder": lambda h: h % 0.7 + torch.floor(h) + h.frac(),
    "masked sum": lambda h: h * (h * (h > 0)).sum(1, keepdim=True),
    "where": lambda h: torch.where(h > 0, h, h.exp() - 1),
    "lerp, addcmul": lambda h: torch.lerp(h, h.tanh(), 0.3).addcmul(h, h, value=0.5),
    "repeat": lambda h: h.repeat(1, 2)[:, 3:9] + h.repeat_interleave(2, 1)[:, :6],
    "pad": lambda h: F.pad(h, (2, 1))[:, :6] + F.pad(h, (1, 1), mode="constant", value=0.5)[:, 2:],
    "index_select": lambda h: h.index_select(1, torch.tensor([0, 0, 2, 2, 5, 1])),
    "take_along": lambda h: torch.take_along_dim(h, h.detach().argsort(1, True), 1),
    "stack": lambda h: torch.stack([h, h.tanh()]).mean(0) + torch.hstack([h[:, 3:], h[:, :3]]),
    "searchsorted": lambda h: h + torch.searchsorted(torch.linspace(-1, 1, 7), h.detach()),
    "tensordot": lambda h: torch.tensordot(h, torch.eye(6).to(h.dtype) * 0.5, 1),
    "trapezoid": lambda h: (
        h + torch.trapezoid(h, dim=1)[:, None] + torch.diff(h, dim=1, prepend=h[:, :1])
    ),
    "full of a number": lambda h: (
        h * torch.full_like(h, 2.0) + torch.ones(6).to(h.dtype) + torch.eye(6)[1]
    ),
}.items():
    _refused = "depends on the data" if _name == "bincount" else None
    add(_name, lambda function=_function: Between(function), kind="numerics", refused=_refused)  # type: ignore[misc]


@specimen(refused="depends on the data")
class BooleanIndex(Layers):
    """How many numbers a mask picks depends on the data."""

    def between(self, h: Tensor) -> Tensor:
        return h + h[h > 0].mean()


@specimen(refused="depends on the data")
class Branches(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h.tanh() if h.sum() > 0 else h


@specimen(refused="depends on the data")
class Unique(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h / len(torch.unique(h.detach().round()))


@specimen(refused="depends on the data")
class Number(Layers):
    """A number is taken out of a tensor."""

    def between(self, h: Tensor) -> Tensor:
        return h * h.detach().mean().item()


@specimen(refused="numpy")
class Numpy(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.from_numpy(h.detach().numpy()).abs()


@specimen(refused="vmap|functorch")
class Vmapped(Layers):
    def between(self, h: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.tanh() * row.sum())(h)


def _classes(examples: int) -> Inputs:
    return (torch.randn(examples, 6), torch.randint(0, 6, (examples,))), {}


class WithLoss(Layers):
    """A loss of torch inside the model."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self.b(torch.tanh(self.a(x))), labels)


for _name, _loss in {
    "cross entropy": nn.CrossEntropyLoss(),
    "cross entropy, sum, smoothed": nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1),
    "cross entropy, none": nn.CrossEntropyLoss(reduction="none"),
    "cross entropy, ignoring": nn.CrossEntropyLoss(ignore_index=2),
    "nll": lambda h, y: F.nll_loss(h.log_softmax(-1), y),
    "multi margin": nn.MultiMarginLoss(),
    "binary": lambda h, y: F.binary_cross_entropy_with_logits(h, F.one_hot(y, 6).to(h.dtype)),
    "divergence": lambda h, y: F.kl_div(
        h.log_softmax(-1), F.one_hot(y, 6).to(h.dtype), reduction="batchmean"
    ),
    "huber": lambda h, y: F.huber_loss(h, F.one_hot(y, 6).to(h.dtype), delta=0.5),
    "smooth l1": lambda h, y: F.smooth_l1_loss(h, F.one_hot(y, 6).to(h.dtype), reduction="sum"),
    "triplet": lambda h, y: F.triplet_margin_loss(h, h.roll(1, 0), h.roll(1, 1)),
    "focal": lambda h, y: (
        (1 - (ce := F.cross_entropy(h, y, reduction="none")).neg().exp()) ** 2 * ce
    ).mean(),
    "weighted": lambda h, y: F.cross_entropy(h, y, torch.linspace(0.5, 1.5, 6)),
    "cosine": lambda h, y: F.cosine_embedding_loss(h, h.tanh().roll(1, 1), y.sign() * 2 - 1),
}.items():
    add(f"loss: {_name}", lambda loss=_loss: WithLoss(loss), _classes, kind="numerics")  # type: ignore[misc]


@specimen(sequences, refused="depends on the data")
class Ctc(nn.Module):
    """A loss over alignments."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.a(x).log_softmax(-1).transpose(0, 1)
        targets = torch.tensor([[1, 2]]).expand(len(x), 2)
        return F.ctc_loss(steps, targets, [5] * len(x), [2] * len(x))

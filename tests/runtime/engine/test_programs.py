"""Stages that run as programs learn what stages under autograd do, and keep less in between."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from unittest.mock import patch

import pytest
import small_models
import torch
from one_rank import OPTIMIZER, ROUND, Data, OneRank, all_halved, none_halved, regression
from torch import Tensor, nn

from pipedream.runtime.data.reader import Batch
from pipedream.runtime.stages.stage_program import StageProgram

EXACT = {"rtol": 0.0, "atol": 1e-12}


def made(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return make().to(dtype)


class TiedInside(nn.Module):
    """A weight that two layers of a stage share, under a function that uses it once more."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))) @ self.b.weight)


class Chunks(nn.Module):
    """Operators of several outputs between the stages, one of which is of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 12), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.a(x).chunk(2, -1)
        values, places = self.b(first).sort(-1)
        return self.c(values) + second.gather(-1, places)


class Frozen(small_models.Chain):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.b.linear.weight.requires_grad_(False)


class NothingToLearn(nn.Module):
    """The second of three stages has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(torch.tanh(self.a(x))) * 2)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.norm(self.a(x[:, None]))).flatten(1))


class Dropping(nn.Module):
    """Draws of several kinds: one of them depends on data, one reads a shape alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = small_models.Layer(6), nn.Dropout(0.5)
        self.alpha, self.b = nn.AlphaDropout(0.3), small_models.Layer(6)
        self.rows, self.c = nn.Dropout1d(0.4), small_models.Layer(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.alpha(self.drop(self.a(x)))
        x = self.rows(self.b(x)) + 0.1 * torch.rand_like(x) * torch.bernoulli(x.sigmoid())
        return self.c(x) + torch.randn(6, dtype=x.dtype)


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "chain": (small_models.Chain, 3),
    "skips": (small_models.Skips, 3),
    "integers between": (small_models.Sorted, 3),
    "tied": (TiedInside, 1),
    "chunks": (Chunks, 2),
    "frozen": (Frozen, 3),
    "first stage frozen": (small_models.FrozenFirst, 3),
    "nothing to learn": (NothingToLearn, 4),
    "batch norm": (small_models.Normed, 2),
    "convolution": (Convolved, 2),
    "buffers": (small_models.Averaging, 3),
    "no gradient": (small_models.Aside, 3),
    "piece of a gradient": (small_models.Token, 2),
    "dropout": (Dropping, 3),
}


def assert_same(one: OneRank, other: OneRank, **close: float) -> None:
    torch.testing.assert_close(one.losses, other.losses, **close)
    torch.testing.assert_close(one.state, other.state, **close)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_halves_as_programs_learn_what_whole_passes_under_autograd_do(
    name: str, recompute: bool
) -> None:
    """Five minibatches, two updates: with momentum and decay a gradient of zero is not none."""
    make, stages = CASES[name]
    whole = OneRank(made(make), regression(), stages, halved=none_halved, recompute=recompute)
    halves = OneRank(made(make), regression(), stages, recompute=recompute)
    assert_same(halves.train(), whole.train(), **EXACT)
    assert halves.obstacles == [None] * stages
    assert whole.obstacles == ["unused"] * stages


@pytest.mark.parametrize("name", ["chain", "tied", "chunks", "convolution", "no gradient"])
def test_halves_learn_what_the_plain_model_does(name: str) -> None:
    make, stages = CASES[name]
    halves, model, data = OneRank(made(make), regression(), stages).train(), made(make), regression()
    optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZER.args)
    for first in range(0, len(data.batches), ROUND):
        batches = data.batches[first : first + ROUND]
        for each in batches:
            loss = nn.functional.mse_loss(model(*each.inputs), each.target)
            (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {n: t for n, t in model.state_dict().items() if n in halves.state}
    torch.testing.assert_close(halves.state, state, **EXACT)

"""Dropout that is drawn before: the numbers are those of the operators, to the last bit, and what
is compiled is one graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional

from pipedream.capture.compiled import compiled
from pipedream.capture.export import capture
from pipedream.capture.rewrites.drawn_apart import DrawnApart
from pipedream.capture.segment import Segment, freeze_constants, segment
from pipedream.runtime.stages.randomness import MinibatchRng, seed_each

CPU = torch.device("cpu")
TRIANGLE = torch.ones(5, 5, dtype=torch.bool).tril()


@pytest.fixture(autouse=True)
def other_tests_validate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling switches the checks of torch.distributions off, for the whole process."""
    kind = torch.distributions.Distribution
    monkeypatch.setattr(kind, "_validate_args", kind._validate_args)


class Function(nn.Module):
    """A function of an input and of what a layer makes of it."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.layer(x))


def heads(x: Tensor, **options: object) -> Tensor:
    """Attention of two heads with dropout."""
    q = x.unflatten(-1, (2, 2)).transpose(-3, -2)
    given = {"dropout_p": 0.3, **options}
    made = functional.scaled_dot_product_attention(q, q.roll(1, -2), q.roll(2, -2), **given)
    return made.transpose(-3, -2).flatten(-2)


def grouped(x: Tensor) -> Tensor:
    """Four heads that share two keys and values."""
    q = x.unflatten(-1, (4, 1)).transpose(-3, -2)
    k = x.unflatten(-1, (4, 1)).transpose(-3, -2)[..., :2, :, :]
    made = functional.scaled_dot_product_attention(q, k, k, dropout_p=0.3, enable_gqa=True)
    return made.transpose(-3, -2).flatten(-2)


def learned_queries(y: Tensor) -> Tensor:
    """One query of all examples, whose weights are dropped for each."""
    k = y.unflatten(-1, (2, 2)).transpose(-3, -2)
    made = functional.scaled_dot_product_attention(k[:1, :, :3], k, k, dropout_p=0.5)
    return made.transpose(-3, -2).flatten(-2)


def recurrent(y: Tensor, dropout: float) -> Tensor:
    """Two layers of two directions, with weights that are constants."""
    sizes = [(12, 4), (12, 3), (12,), (12,)] * 2 + [(12, 6), (12, 3), (12,), (12,)] * 2
    weights = [torch.arange(math.prod(size)).sin().reshape(size).to(y) / 3 for size in sizes]
    state = [torch.zeros(4, len(y), 3).to(y)] * 2
    args = weights, True, 2, dropout, True, True, True
    result: Tensor = torch.lstm(y, state, *args)[0]
    return result


FUNCTIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "dropout": (lambda _, y: functional.dropout(y, 0.3).relu(), 1),
    "two": (lambda x, y: functional.dropout(functional.dropout(x, 0.1) * y, 0.5), 2),
    "another order in memory": (lambda _, y: functional.dropout(y.transpose(1, 2), 0.3), 1),
    "attention": (lambda _, y: heads(y), 1),
    "causal": (lambda _, y: heads(y, is_causal=True), 1),
    "a mask": (lambda _, y: heads(y, attn_mask=TRIANGLE, scale=0.7), 1),
    "a mask of numbers": (lambda _, y: heads(y, attn_mask=torch.where(TRIANGLE, 0.5, -2.0)), 1),
    "grouped": (lambda _, y: grouped(y), 1),
    "queries of all examples": (lambda _, y: learned_queries(y), 1),
    "a negative scale": (lambda _, y: heads(y, scale=-0.5), 0),
    "of a constant": (lambda _, y: y * functional.dropout(torch.arange(4.0).sin(), 0.3).to(y), 1),
    "never": (lambda _, y: functional.dropout(y, 0.0), 0),
    "attention without dropout": (lambda _, y: heads(y, dropout_p=0.0), 0),
    "an LSTM without dropout": (lambda _, y: recurrent(y, 0.0), 0),
    "an LSTM": (lambda _, y: recurrent(y, 0.4), 0),
    "stochastic depth": (lambda _, y: y * y.new_empty(2, 1, 1).bernoulli_(0.6) / 0.6, 1),
    "noise": (lambda x, y: y + 0.1 * torch.randn_like(x.transpose(1, 2)).transpose(1, 2), 1),
    "rand": (lambda x, y: y * (torch.rand(2, 1, 1, dtype=x.dtype) < 0.6) + torch.rand_like(x), 2),
    "normal": (lambda _, y: y * torch.empty_like(y).normal_(1.0, 0.1), 1),
    "of data": (lambda _, y: y * torch.bernoulli(y.sigmoid()), 0),
}


def made(name: str, dtype: torch.dtype) -> tuple[Segment, Tensor, MinibatchRng]:
    """The function as a stage whose draws are seeded."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 4, dtype=dtype)
    captured = capture(Function(FUNCTIONS[name][0]).to(dtype), (x,))
    part = freeze_constants(segment(captured, captured.working, captured.outputs), captured.owner)
    rng = MinibatchRng(7, CPU)
    seed_each(part, captured.module, rng)
    return part, x, rng


def gradients(run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """What it gives, and its gradient."""
    given = x.clone().requires_grad_()
    result = run(given)
    result.backward(torch.ones_like(result))
    assert given.grad is not None
    return [result.detach(), given.grad]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_those_of_the_operators(name: str, dtype: torch.dtype) -> None:
    part, x, rng = made(name, dtype)
    apart = DrawnApart.of(part.module, CPU)
    in_bfloat16 = name in (
        *("attention", "causal", "a mask", "a mask of numbers", "grouped"),
        "queries of all examples",
    )
    wide = dtype == torch.bfloat16 and in_bfloat16
    assert len(apart.draws) == (0 if wide else FUNCTIONS[name][1])
    for rng.minibatch in range(3):
        wanted = gradients(lambda x: part.module(x)[0], x)
        found = gradients(lambda x: apart.module(x, *apart.values())[0], x)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)


NEVER = "never", "attention without dropout", "an LSTM without dropout"


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_compiled_as_one_graph(name: str) -> None:
    """Other numbers in each minibatch, none of them a part of what is compiled."""
    part, x, rng = made(name, torch.float64)
    torch._dynamo.reset()
    counters.clear()
    run = compiled(part.module, "aot_eager", CPU)
    state = dict(part.module.named_parameters())
    seen = set()
    for rng.minibatch in range(3):
        wanted = gradients(lambda x: part.module(x)[0], x)
        found = gradients(lambda x: run(state, (x,))[0], x)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
        seen.add(float(found[0].sum()))
    assert len(seen) == (1 if name in NEVER else 3)
    assert bool(counters["graph_break"]) == (name in ("of data", "a negative scale", "an LSTM"))


def test_without_a_seed_it_draws_as_it_is() -> None:
    numbers = count()
    torch.manual_seed(0)
    captured = capture(Function(FUNCTIONS["dropout"][0]), (torch.randn(2, 5, 4),))
    part = segment(captured, captured.working, captured.outputs)
    apart = DrawnApart.of(part.module, CPU)
    torch.manual_seed(next(numbers))
    (factors,) = apart.values()
    torch.manual_seed(0)
    assert torch.equal(factors, functional.dropout(torch.ones(2, 5, 4), 0.3))


def test_any_number_of_stages_is_compiled() -> None:
    """Torch gave up after eight, as all had one code: further stages, or sizes of a minibatch, ran
    as they are.
    """
    part, x, _ = made("never", torch.float64)
    torch._dynamo.reset()
    counters.clear()
    for _ in range(12):
        compiled(part.module, "eager", CPU)(dict(part.module.named_parameters()), (x,))
    assert counters["stats"]["unique_graphs"] == 12

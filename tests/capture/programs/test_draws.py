"""Random numbers are drawn before the passes, as the module itself would draw them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipedream.capture.programs.draws import note_seed
from pipedream.capture.programs.program import traced_program


class Seed(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self) -> None:
        if not note_seed(self):
            torch.manual_seed(self.seed)


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Seed, Seed, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.draw = nn.Parameter(torch.ones(6)), draw
        self.one, self.other = Seed(1), Seed(2)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.draw(self.one, self.other, x * self.weight),)


def dropout(one: Seed, other: Seed, x: Tensor) -> Tensor:
    one()
    x = nn.functional.dropout(x, 0.5)
    other()
    return nn.functional.dropout(x, 0.3)


def several(one: Seed, other: Seed, x: Tensor) -> Tensor:
    one()
    return x * torch.rand_like(x) + torch.randn_like(x.t()).t() + torch.empty_like(x).exponential_()


def seeds_in_turn(one: Seed, other: Seed, x: Tensor) -> Tensor:
    other()
    first = torch.rand(6)
    one()
    return x * first * torch.rand(6)


def of_data(one: Seed, other: Seed, x: Tensor) -> Tensor:
    """The first draw has to stay, and so has the second, which goes on after it."""
    one()
    kept = torch.bernoulli(x.sigmoid())
    return x * kept * torch.rand_like(x)


def of_data_later(one: Seed, other: Seed, x: Tensor) -> Tensor:
    one()
    x = x * torch.rand_like(x)
    other()
    return x * torch.bernoulli(x.sigmoid())


def written(one: Seed, other: Seed, x: Tensor) -> Tensor:
    """What is read is what was drawn before it was changed."""
    one()
    drawn = torch.rand(6)
    read = drawn * 1
    first = x + drawn
    drawn.mul_(3)
    return first * read + x * drawn


@pytest.mark.parametrize(
    ("draw", "before"),
    [
        (dropout, 2),
        (several, 3),
        (seeds_in_turn, 2),
        (of_data, 0),
        (of_data_later, 1),
        (written, 3),
    ],
)
def test_draws(draw: Callable[[Seed, Seed, Tensor], Tensor], before: int) -> None:
    """`before`: how many values are drawn before the forward pass; all are the module's own."""
    module, given = Drawing(draw), torch.randn(4, 6)
    program = traced_program(module, dict(module.named_parameters()), [given], [True])  # type: ignore[arg-type]
    weight, own = module.weight, given.clone().requires_grad_()
    (expected,) = module(own)
    for _ in range(2):
        torch.manual_seed(5)
        drawn = program.draw()
        assert len(drawn) == before
        if before:
            torch.rand(3)  # what others draw in between
        (output,), saved = program.forward({"weight": weight}, [given], drawn)
        assert torch.equal(output, expected)
        (gradient,), kept = program.backward(saved, [torch.ones(4, 6)])
        found = dict(program.weight_gradients(kept))
    expected.sum().backward()
    torch.testing.assert_close(gradient, own.grad)
    torch.testing.assert_close(found["weight"], weight.grad)

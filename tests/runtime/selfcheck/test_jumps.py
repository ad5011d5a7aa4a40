"""Gradients of operators whose derivative jumps: a sum in another order may bring a number to the
other side, and what is computed is right all the same.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from pipedream.capture.checks.equivalence import any_loss, check_equivalence
from pipedream.capture.checks.rounding import may_jump, moved_at_random, moved_inside
from pipedream.capture.export import capture
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.selfcheck import reference as module
from pipedream.runtime.selfcheck.fingerprint import apart, fingerprint
from pipedream.runtime.selfcheck.reference import Expected, Reference
from pipedream.runtime.stages.randomness import MinibatchRng

CPU = torch.device("cpu")
WEIGHT = "the gradient of 0.weight"


def nearly_zero(activation: nn.Module) -> tuple[nn.Module, Tensor]:
    """A model of which half of 64 numbers are a little more than zero before the activation, by ten
    units of rounding of what they are sums of, and the others far from it.
    """
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(256, 64)
    x = torch.randn(1, 256, generator=generator)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(64, 256, generator=generator))
        linear.bias.zero_()
        sums = linear(x)[0].double()
        linear.bias[:32] = (2e-5 - sums[:32]).float()
    return nn.Sequential(linear, activation), x


def expected(model: nn.Module, x: Tensor) -> dict[str, Expected]:
    captured = capture(model, (x,))
    tolerance = check_equivalence(model, captured, (x,), {}, any_loss)
    assert tolerance is not None
    rng = MinibatchRng(0, CPU)
    reference = Reference(lambda output, _: any_loss(output), rng, 1.0, {}, tolerance)
    return reference.round({0: (captured, Batch((x,), None))})


def with_a_number_on_the_other_side(model: nn.Sequential, x: Tensor) -> Tensor:
    """Returns the gradient of the weight if one of the numbers near zero is below it."""
    linear = model[0]
    assert isinstance(linear, nn.Linear)
    with torch.no_grad():
        linear.bias[3] -= 4e-5
    (gradient,) = torch.autograd.grad(any_loss(model(x)), [linear.weight])
    return gradient


def test_a_relu_may_jump() -> None:
    """The classifier of VGG-16, on a mesh of two that adds up a product of 25,088 in two parts, was
    refused: the gradient differed by 0.7 %, of one row of a weight, and rounding, once, by 0.01 %.
    """
    model, x = nearly_zero(nn.ReLU())
    wanted = expected(model, x)[WEIGHT]
    with patch.object(module, "may_jump", lambda _: False):
        strict = expected(model, x)[WEIGHT]
    gradient = with_a_number_on_the_other_side(model, x)
    off = apart(wanted.fingerprint, fingerprint(gradient))
    assert strict.most < off <= wanted.most < 0.9 * wanted.fingerprint[0]


def test_a_smooth_activation_may_not() -> None:
    model, x = nearly_zero(nn.GELU())
    wanted = expected(model, x)[WEIGHT]
    assert wanted.most <= 4e-4 * wanted.fingerprint[0]


def test_only_gradients_may() -> None:
    model, x = nearly_zero(nn.ReLU())
    loss = expected(model, x)["the loss of minibatch 0"]
    assert loss.most <= 1e-3 * loss.fingerprint[0]


@pytest.mark.parametrize(
    ("activation", "jumps"),
    [
        (nn.ReLU(), True),
        (nn.ReLU(inplace=True), True),
        (nn.MaxPool1d(2), True),
        (nn.Hardtanh(), True),
        (nn.GELU(), False),
        (nn.SiLU(), False),
        (nn.Softmax(-1), False),
    ],
)
def test_what_jumps(activation: nn.Module, jumps: bool) -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 4), activation), (torch.randn(2, 4),))
    assert may_jump(captured.module) is jumps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex64])
def test_parameters_are_as_before_afterwards(dtype: torch.dtype) -> None:
    model = nn.Linear(5, 3, dtype=dtype)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    model.counts = nn.Parameter(torch.arange(1_000_000, 1_000_009), requires_grad=False)
    with pytest.raises(RuntimeError, match="inside"), moved_inside(model, 1e-4):  # noqa: PT012
        for name, each in moved_at_random(before, 1e-4).items():
            assert torch.equal(model.get_parameter(name), each)
            assert not torch.equal(before[name], each)
            torch.testing.assert_close(before[name], each.detach(), rtol=1.5e-4, atol=0)
        assert torch.equal(model.counts, torch.arange(1_000_000, 1_000_009))
        raise RuntimeError("inside")
    assert all(torch.equal(model.get_parameter(name), each) for name, each in before.items())

"""Convolutions that do the work of the batch norms behind them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from image_models import models
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from pipedream.capture.export import capture
from pipedream.capture.rewrites.fold_norms import fold_norms
from pipedream.capture.segment import freeze_constants, segment


class Both(nn.Module):
    """What the convolution gives is read by its norm, and by another operator."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) + y


class Other(nn.Module):
    """Its norm takes the statistics of the minibatch, as those of a meta-learner do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(self.conv(x), None, None, training=True)


def pair(norm: nn.Module, *args: int, dims: int = 2, **kwargs: object) -> nn.Module:
    kind = getattr(nn, f"Conv{dims}d")
    return nn.Sequential(kind(4, 8, 3, *args, **kwargs), norm, nn.ReLU())


def images(*sizes: int, channels: int = 4) -> Tensor:
    return torch.randn(2, channels, *sizes, dtype=torch.float64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, int]] = {
    "plain": (lambda: pair(nn.BatchNorm2d(8)), images(9, 7), 1),
    "without bias": (lambda: pair(nn.BatchNorm2d(8), bias=False), images(9, 9), 1),
    "groups, stride, padding": (
        lambda: pair(nn.BatchNorm2d(8), 2, 1, groups=2),
        images(9, 9),
        1,
    ),
    "padding by name": (lambda: pair(nn.BatchNorm2d(8), padding="same"), images(9, 9), 0),
    "not affine": (lambda: pair(nn.BatchNorm2d(8, affine=False)), images(9, 9), 1),
    "no statistics": (
        lambda: pair(nn.BatchNorm2d(8, track_running_stats=False)),
        images(9, 9),
        0,
    ),
    "one dimension": (lambda: pair(nn.BatchNorm1d(8), dims=1), images(40), 1),
    "three dimensions": (lambda: pair(nn.BatchNorm3d(8), dims=3), images(9, 9, 9), 1),
    "more weights than results": (lambda: pair(nn.BatchNorm2d(8)), images(3, 3), 1),
    "read twice": (Both, images(9, 9, channels=3), 0),
    "statistics of the minibatch": (Other, images(9, 9, channels=3), 0),
    "resnet18": (
        lambda: models.resnet18(num_classes=4),
        images(64, 64, channels=3),
        20,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_results_are_those_of_the_norms(name: str) -> None:
    """Also with what parameters and statistics become afterwards."""
    torch.manual_seed(0)
    make, x, folded = MODELS[name]
    model = make().double()
    model(x)  # so that there are statistics
    captured = capture(model, (x,), training=False)
    part = freeze_constants(segment(captured, captured.working, captured.outputs), captured.owner)
    (plain,) = part.module(x)
    norms = fold_norms(part.module)
    assert len(norms.folds) == folded
    for _ in range(2):
        tensors = dict(captured.module.named_parameters()) | dict(captured.module.named_buffers())
        (found,) = functional_call(part.module, tensors | norms.values(tensors), (x,))
        torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.mul_(1.01)
        plain = model.eval()(x)


def test_types_that_differ_are_left_alone() -> None:
    """As statistics in float32 of a model in bfloat16."""
    model = pair(nn.BatchNorm2d(8)).bfloat16()
    model[1].float()  # type: ignore[operator, index]
    x = torch.randn(2, 4, 9, 9, dtype=torch.bfloat16)
    captured = capture(model, (x,), training=False)
    part = segment(captured, captured.working, captured.outputs)
    assert not fold_norms(part.module).folds


def test_what_is_not_given_is_not_guessed() -> None:
    """A pass without the weights that the norms are part of."""
    model = pair(nn.BatchNorm2d(8)).double()
    x = images(9, 9)
    captured = capture(model, (x,), training=False)
    part = segment(captured, captured.working, captured.outputs)
    assert len(fold_norms(part.module).folds) == 1
    with pytest.raises(RuntimeError, match=r"weight|bias"):
        part.module(x)

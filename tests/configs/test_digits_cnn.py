"""The digits run: its data are what it says, and its model learns from them."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch.nn import functional as F


@pytest.mark.slow
def test_the_images_are_scaled_and_shaped_as_documented(digits_cnn: ModuleType) -> None:
    train, held_out = digits_cnn.data()
    assert (len(train), len(held_out)) == (1437, 360)
    image, digit = train[0]
    assert (image.shape, image.dtype) == ((1, 8, 8), torch.float32)
    assert (digit.shape, digit.dtype) == ((), torch.int64)
    images, digits = train.tensors
    assert (images.min(), images.max()) == (0, 1)
    assert set(digits.tolist()) == set(range(10))


def test_no_held_out_image_is_trained_on(digits_cnn: ModuleType) -> None:
    train, held_out = (
        {tuple(image.flatten().tolist()) for image in part.tensors[0]} for part in digits_cnn.data()
    )
    assert len(train) + len(held_out) == 1797
    assert not train & held_out


def test_the_split_is_always_the_same(digits_cnn: ModuleType) -> None:
    first, again, other = digits_cnn.data(), digits_cnn.data(), digits_cnn.data(seed=1)
    assert torch.equal(first[1].tensors[0], again[1].tensors[0])
    assert not torch.equal(first[1].tensors[0], other[1].tensors[0])


def test_a_few_steps_learn(digits_cnn: ModuleType) -> None:
    torch.manual_seed(0)
    train, _ = digits_cnn.data()
    model = digits_cnn.model(channels=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, digits = train[:64]
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(model(images), digits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert model(images).shape == (64, 10)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[-1] < losses[0] - 0.1

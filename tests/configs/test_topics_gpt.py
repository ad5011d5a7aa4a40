"""The topics run: windows of real text, each with itself one byte later, and a causal model."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch


def test_a_target_is_its_window_one_byte_later(topics_gpt: ModuleType) -> None:
    train, held_out = topics_gpt.data(length=32)
    window, following = train[0]
    assert (window.shape, window.dtype) == ((32,), torch.int64)
    assert torch.equal(window[1:], following[:-1])
    assert following[-1] == train[1][0][0]
    assert len(held_out) == pytest.approx(len(train) / 9, rel=0.01)
    assert 'The "assert" statement' in bytes(train.tensors[0][:40].flatten().tolist()).decode()


def test_held_out_windows_follow_the_training_ones(topics_gpt: ModuleType) -> None:
    train, held_out = topics_gpt.data()
    assert torch.equal(train[-1][1][-1], held_out[0][0][0])
    assert len(train) * 64 > 400_000


def test_an_untrained_model_knows_nothing(topics_gpt: ModuleType) -> None:
    torch.manual_seed(0)
    model = topics_gpt.model(width=32, layers=2)
    window, following = topics_gpt.data()[0][:8]
    logits = model(window)
    assert logits.shape == (8, 64, 256)
    assert topics_gpt.loss(logits, following).item() == pytest.approx(math.log(256), abs=0.5)


def test_no_position_sees_what_follows_it(topics_gpt: ModuleType) -> None:
    model = topics_gpt.model(width=32, layers=2).eval()
    window = topics_gpt.data()[0][0][0].unsqueeze(0)
    changed = window.clone()
    changed[0, 40:] = 7
    before, after = model(window), model(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_a_few_steps_learn(topics_gpt: ModuleType) -> None:
    torch.manual_seed(0)
    model = topics_gpt.model(width=32, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    window, following = topics_gpt.data()[0][:16]
    losses = []
    for _ in range(10):
        loss = topics_gpt.loss(model(window), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[-1] < losses[0] - 0.5

"""What updates take and keep."""

from __future__ import annotations

import torch
from torch import nn

from pipedream.capture.export import capture
from pipedream.profiler.timing.optimizer_step import OPTIMIZERS, updates

CPU = torch.device("cpu")


def test_what_an_optimizer_keeps_for_each_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[1].weight.requires_grad_(False)
    found = updates(capture(model, (torch.ones(1, 3),)), CPU)
    assert found.keys() == OPTIMIZERS.keys()
    weight, bias = 4 * 12, 4 * 2
    for kind, times in {"sgd": 0, "momentum": 1, "adam": 2}.items():
        state = found[kind].state
        assert (state["0.weight"], state["1.bias"]) == (times * weight, times * bias)
        assert "1.weight" not in state
        assert found[kind].bytes_per_second > 0


def test_weights_and_gradients_are_left_as_they_were() -> None:
    model = nn.Linear(3, 4)
    before = model.weight.detach().clone()
    updates(capture(model, (torch.ones(1, 3),)), CPU)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_with_nothing_to_learn_there_are_none() -> None:
    assert updates(capture(nn.ReLU(), (torch.ones(1, 3),)), CPU) == {}

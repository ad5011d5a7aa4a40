"""A large part of a model that a write in place holds together is told, with the line."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipedream.capture.export import capture
from pipedream.capture.grouping import undivided


class Written(nn.Module):
    """What lies before the write reads the memory, and so does what comes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        state = self.layers[0](x)
        shown = state.detach()
        for layer in self.layers[1:]:
            state = state + torch.tanh(layer(state))
            shown.add_(1.0)
        return state + shown


def test_it_names_the_line_and_what_to_write() -> None:
    told = undivided(capture(Written(), (torch.randn(2, 4),)))
    assert "test_undivided.py:" in told
    assert "of the operators, and stays on one stage" in told
    assert "Add writes into" in told or "Add_ writes into" in told


def test_a_model_that_can_be_divided_is_not_told_of() -> None:
    assert undivided(capture(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.randn(2, 4),))) == ""

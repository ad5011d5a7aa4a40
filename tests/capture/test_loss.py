"""A loss that fails says what may be wrong with its arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipedream.capture.loss import load_loss
from pipedream.graph.errors import UserError


@pytest.mark.parametrize(
    ("name", "output", "target", "told"),
    [
        (
            "cross_entropy",
            torch.zeros(3, 5),
            torch.tensor([0, 7, 2]),
            "loss cross_entropy: .*; the output is [3, 5], the target [3]; targets are 0 to 7, and"
            " the output has classes 0 to 4",
        ),
        (
            "cross_entropy",
            torch.zeros(3, 5),
            torch.tensor([0, 1]),
            "; the output is [3, 5], the target [2]",
        ),
        (
            "mse_loss",
            torch.zeros(3, 5),
            torch.zeros(4, 5),
            "; the output is [3, 5], the target [4, 5]",
        ),
        ("cross_entropy", (torch.zeros(3, 5),), torch.tensor([0, 1, 2]), "loss cross_entropy: "),
    ],
)
def test_what_does_not_fit_is_named(name: str, output: object, target: object, told: str) -> None:
    """`Target 7 is out of bounds` was all that was said."""
    with pytest.raises(UserError) as failed:
        load_loss(name, Path())(output, target)
    begin, _, end = told.partition(".*")
    assert failed.value.format_message().startswith(begin) or not end
    assert failed.value.format_message().endswith(end) or not end
    assert begin in failed.value.format_message()

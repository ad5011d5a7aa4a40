"""A loss that fails says what may be wrong with its arguments; a metric, what it has to return."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipedream.capture.loss import load_loss, load_metrics
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


METRICS = """
import torch
def pair(output, target): return (output - target).abs().sum(), target.numel()
def mean(output, target): return (output - target).abs().mean()
def three(output, target): return 1, 2, 3
def lists(output, target): return [torch.zeros(2), 3]
def broken(output, target): return output.logits, 1
"""


def test_a_metric_returns_a_sum_and_of_how_many(tmp_path: Path) -> None:
    (tmp_path / "metrics_of_a_user.py").write_text(METRICS)

    def value(name: str) -> tuple[float, float]:
        metrics = load_metrics({"own": f"metrics_of_a_user:{name}"}, tmp_path)
        return metrics["own"](torch.ones(2, 3), torch.zeros(2, 3))

    assert value("pair") == (6.0, 6.0)
    for name, what in (
        ("mean", r"a tensor \[\]"),
        ("three", r"a tuple \(a int, a int, a int\)"),
        ("lists", r"a list \(a tensor \[2\], a int\)"),
    ):
        told = f"held_out_metrics.own: metrics_of_a_user:{name} returns {what}: return .sum, count"
        with pytest.raises(UserError, match=told):
            value(name)
    with pytest.raises(UserError, match=r"own: .*metrics_of_a_user.py:7: AttributeError"):
        value("broken")
    with pytest.raises(UserError, match="has no 'pare'; did you mean 'pair'"):
        value("pare")

"""A minibatch that trains has the host look at nothing, so that a GPU always has work to do."""

from __future__ import annotations

from typing import Any

import pytest
import small_models
import torch
from looks import Looks
from one_rank import OneRank, none_halved, regression
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from pipedream.runtime.engine.evaluation import EvaluationTotals


def rank(**options: Any) -> OneRank:
    """Two stages with dropout and batch norm."""
    return OneRank(small_models.Noisy().double(), regression(), loss=of_three, **options)


def of_three(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output, target[:, :3])


@pytest.mark.parametrize(
    "options",
    [
        {"halved": none_halved},
        {"halved": none_halved, "recompute": True},
        {"halved": none_halved, "autocast": "bfloat16"},
        {"clip_norm": 0.1},
        {},
    ],
    ids=["whole", "recomputed", "bfloat16", "clipped", "in halves"],
)
def test_nothing_is_looked_at_in_a_minibatch_that_trains(options: dict[str, Any]) -> None:
    """A clipped update was, and every loss."""
    trained = rank(**options).train()
    losses: list[Tensor] = []
    for executor in trained.executors.values():
        executor.on_loss = lambda _, loss: losses.append(loss)
    with Looks() as looks:
        trained.train()
    assert looks.found == []
    assert len(losses) == 5
    assert all(loss.isfinite() for loss in losses)


def test_what_must_be_looked_at_is_seen_to_be() -> None:
    """An update may be left out here: else the test above might see nothing at all."""
    trained = rank(scale=2.0, halved=none_halved)
    for executor in trained.executors.values():
        executor.on_loss = lambda _, loss: None
    with Looks() as looks:
        trained.train()
    assert looks.found == ["aten._local_scalar_dense.default"] * 4  # two updates of two stages


def test_held_out_minibatches_are_looked_at_when_all_are_done() -> None:
    """Each was, twice."""
    totals, plain = EvaluationTotals(), EvaluationTotals()
    outputs = [(torch.randn(4, 3), torch.randint(3, (4,))) for _ in range(5)]
    with Looks() as looks, torch.no_grad():
        for output, target in outputs:
            totals.add_outputs(output, target, len(output), cross_entropy, {})
    assert looks.found == []
    for output, target in outputs:
        right = int((output.argmax(-1) == target).sum())
        plain.add(cross_entropy(output, target).item(), len(output), (right, len(target)))
    assert totals.looked_at() == plain
    totals.add_outputs(torch.ones(2), torch.ones(2), 2, mse_loss, {})
    assert (totals.looked_at().right, totals.predictions) == (0, 0), "of some there are none"

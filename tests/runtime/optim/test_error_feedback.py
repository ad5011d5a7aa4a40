"""Error feedback by hand: what is kept, what is made good, and what a step that is left out does.

Runs against the serial reference are in test_late_gradients.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipedream.runtime.optim.error_feedback import ErrorFeedback
from pipedream.runtime.optim.weights import Weights


class Learning:
    """One number that SGD with momentum learns at rate 1: a step is minus the momentum."""

    def __init__(self, strength: float = 1.0, momentum: float = 0.0) -> None:
        self.parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0, momentum=momentum)
        self.feedback = ErrorFeedback(self.optimizer, strength)

    def update(self, number: int, gradient: float | None, rate: float = 1.0) -> float:
        """The parameter after the update that makes this version."""
        self.optimizer.param_groups[0]["lr"] = rate
        self.parameter.grad = None
        if gradient is not None:
            self.parameter.grad = torch.full_like(self.parameter, gradient)
        self.feedback.expect(number, {})
        self.optimizer.step()
        return self.parameter.item()


def test_a_step_is_made_good_when_its_own_gradient_comes() -> None:
    """One update late: 2, 3, 5 come where the first was on time, the second is no one's again."""
    learning = Learning()
    learning.feedback.follow({3: 2, 4: 3})
    assert learning.update(1, 2.0) == -2.0
    assert learning.update(2, 3.0) == -5.0, "made with the gradient of the first version, too"
    assert learning.update(3, 5.0) == -5.0 - 5.0 - (5.0 - 3.0)
    assert learning.update(4, 7.0) == -12.0 - 7.0 - (7.0 - 5.0)


def test_a_step_is_as_large_as_the_rate_now_makes_it() -> None:
    learning = Learning()
    learning.feedback.follow({2: 1, 3: 2})
    learning.update(1, 2.0, rate=1.0)
    assert learning.update(2, 4.0, rate=0.5) == -2.0 - 2.0 - (2.0 - 1.0)
    assert learning.update(3, 4.0, rate=0.0) == -5.0, "no rate, no step, nothing to make good"


def test_a_part_of_the_difference() -> None:
    learning = Learning(strength=0.25)
    learning.feedback.follow({2: 1})
    learning.update(1, 2.0)
    assert learning.update(2, 6.0) == -2.0 - 6.0 - 0.25 * (6.0 - 2.0)


def test_a_step_that_was_left_out_makes_nothing_good() -> None:
    """With gradients that are not finite there is no step: neither of it nor by it."""
    learning = Learning()
    learning.feedback.follow({2: 1, 3: 2, 4: 3})
    learning.update(1, 2.0)
    learning.feedback.expect(2, {})  # and the optimizer is not called
    assert learning.update(3, 5.0) == -2.0 - 5.0
    assert learning.update(4, 6.0) == -7.0 - 6.0 - (6.0 - 5.0)


def test_steps_that_nothing_makes_good_any_more_are_forgotten() -> None:
    """Each update that was left out left a copy of the parameters behind."""
    learning = Learning()
    learning.feedback.follow({number + 1: number for number in range(1, 50)})
    for number in range(1, 50):
        if number % 5:
            learning.update(number, 1.0)
        else:
            learning.feedback.expect(number, {})
    assert sorted(learning.feedback.steps) == [49]


def test_no_more_steps_are_kept_than_are_made_good() -> None:
    learning = Learning()
    learning.feedback.follow({5: 2, 6: 3})
    kept = []
    for number in range(1, 7):
        learning.update(number, 1.0)
        kept.append(sorted(learning.feedback.steps))
    assert kept == [[], [2], [2, 3], [2, 3], [3], []]


def test_the_older_version_is_what_the_step_is_measured_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under 2BW a minibatch still needs it, so that no copy is made for the correction."""
    learning = Learning()
    weights = Weights({"w": learning.parameter})
    weights.feedback = learning.feedback
    weights.begin()
    weights.expect({0: 2, 1: 1})
    learning.feedback.follow({2: 1})
    version = weights.acquire(0)
    monkeypatch.setattr(torch.Tensor, "clone", None)
    for number, gradient in ((1, 2.0), (2, 3.0)):
        given = {"w": torch.full((1,), gradient, dtype=torch.float64)}
        weights.update(given, learning.optimizer.step, number)
    assert weights.current.tensors["w"].item() == -2.0 - 3.0 - (3.0 - 2.0)
    assert version.tensors["w"].item() == 0.0


def test_parameters_without_a_gradient_are_left_alone() -> None:
    learning = Learning()
    learning.feedback.follow({2: 1, 3: 2})
    learning.update(1, None)
    assert learning.update(2, 3.0) == -3.0, "nothing was made in its place"
    assert learning.update(3, None) == -3.0

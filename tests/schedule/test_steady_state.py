"""The time per minibatch is that of a full pipeline, of all epochs together."""

from __future__ import annotations

import pytest

from pipedream.schedule import steady_state as pace
from pipedream.schedule.steady_state import Pace


def measured(
    monkeypatch: pytest.MonkeyPatch, warm_up: int, *epochs: tuple[float, list[float], float]
) -> Pace:
    """Of epochs that begin, have backward passes end, and end at these moments."""
    now = iter([moment for begin, ends, end in epochs for moment in (begin, *ends, end)])
    monkeypatch.setattr(pace.time, "perf_counter", lambda: next(now))
    found = Pace(warm_up)
    for _, ends, _ in epochs:
        found.begin_epoch()
        for _ in ends:
            found.passed()
        found.end_epoch()
    return found


def test_the_filling_of_the_pipeline_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas: each has every other minibatch."""
    first, second = (0.0, [5.0, 6.0, 8.0, 10.0], 11.0), (20.0, [29.0, 30.0, 33.0], 34.0)
    found = measured(monkeypatch, 1, first, second)
    assert found.seconds_per_minibatch(1) == pytest.approx((4.0 + 3.0) / 3)
    assert found.seconds_per_minibatch(2) == pytest.approx((4.0 + 3.0) / 3 / 2)


def test_of_a_very_short_epoch_all_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, 2, (0.0, [5.0, 6.0], 8.0))
    assert found.seconds_per_minibatch(1) == pytest.approx(4.0)
    assert Pace(2).seconds_per_minibatch(1) == 0.0

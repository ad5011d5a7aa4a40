"""Which minibatches find the pipeline full, how long they take, and what is left idle."""

from __future__ import annotations

import pytest
from played import played
from schedules import policy

from pipedream.graph.choices import ScheduleName
from pipedream.graph.timeline import Timeline
from pipedream.schedule.steady_state import SteadySpan, bubble, steady_window


def steady(
    name: ScheduleName, replicas: tuple[int, ...], minibatches: int, known: int = 0
) -> tuple[int, int] | None:
    span = SteadySpan.within(policy(name, replicas, 4), minibatches, known)
    return span and (span.first, span.last)


def test_the_steady_part_of_an_epoch() -> None:
    assert steady("flush", (1, 1), 14) == (4, 12)
    assert steady("flush", (1, 1), 7) is None
    assert steady("weight-stashing", (2, 1), 8) is None
    assert steady("weight-stashing", (2, 1), 9) == (4, 5)


def test_the_steady_part_where_the_beginning_was_not_recorded() -> None:
    """The last 10 of 20 minibatches: of those, the first find it as empty as a new pipeline."""
    assert steady("weight-stashing", (1, 1), 20, known=10) == (12, 18)
    assert steady("flush", (1, 1), 22, known=12) == (16, 20)
    assert steady("flush", (1, 1), 22, known=13) is None


def test_in_the_window_all_stages_complete_as_many_minibatches() -> None:
    """Two equal stages of passes of 10 ms: a minibatch completes every 20 ms once it is full."""
    timeline: Timeline = played((1, 1), 20)
    span = SteadySpan(20, 2, 18)
    begin, end = steady_window(timeline, span)
    assert (end - begin) / len(span) == pytest.approx(0.02)
    first, last = steady_window(timeline, None)
    assert first <= begin < end <= last


def test_what_is_not_busy_is_the_bubble() -> None:
    assert bubble(busy=6.0, ranks=2, window=4.0) == 0.25
    assert bubble(busy=8.0 + 1e-12, ranks=2, window=4.0) == 0.0
    assert bubble(busy=0.0, ranks=2, window=0.0) == 0.0

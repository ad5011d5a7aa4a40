"""Where a run stops that is asked to, and that every rank can still stop there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import policy, schedule

from pipedream.graph.choices import SCHEDULES, ScheduleName
from pipedream.runtime.run.training_segment import (
    Position,
    RankProgress,
    TrainingSegment,
    stopping_position,
    whole_updates,
    window,
)

TWO = policy("weight-stashing", (1, 1))  # two minibatches in flight
THREE = policy("flush", (1, 1, 1), microbatches=4)


@pytest.mark.parametrize(
    ("numbers", "place"),
    [
        # Two minibatches further than rank 0 is.
        ([(0, 0, 100, 7), (0, 0, 100, 5)], Position(0, 9)),
        # Nothing is begun, and what was done before is saved.
        ([(2, 40), (2, 40)], Position(2, 40)),
        ([(2, 0), (2, 0)], Position(2, 0)),
        # Rank 1 has not begun the segment yet; it will do as much of it.
        ([(0, 40, 80, 3), (0, 0, 40, 40)], Position(0, 45)),
        ([(0, 40, 80, 3), (0, 40)], Position(0, 45)),
        # At the end of the segment, for there is no place before it.
        ([(0, 40, 80, 39), (0, 40, 80, 38)], Position(0, 80)),
        ([(0, 80, 100, 19), (0, 80, 100, 18)], Position(0, 100)),
        # Rank 1 tries the held-out data after the epoch already.
        ([(0, 80, 100, 20), (1, 0)], Position(1)),
    ],
)
def test_the_place_is_ahead_of_all_ranks(numbers: list[tuple[int, ...]], place: Position) -> None:
    progress = [rank_progress(*each) for each in numbers]
    assert stopping_position(progress, TWO) == place
    assert stopping_position([RankProgress.of(s.as_json) for s in progress], TWO) == place


def rank_progress(epoch: int, begin: int, end: int | None = None, touched: int = 0) -> RankProgress:
    segment = None if end is None else TrainingSegment(begin, end)
    return RankProgress(Position(epoch, begin), segment, touched)


def test_the_place_is_after_whole_updates() -> None:
    """Nine are touched and three may be in flight: twelve, three updates of four."""
    assert stopping_position([rank_progress(0, 0, 100, 9)], THREE) == Position(0, 12)
    assert stopping_position([rank_progress(0, 0, 100, 10)], THREE) == Position(0, 16)


@given(
    name=st.sampled_from(SCHEDULES),
    replicas=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    size=st.integers(1, 4),
    max_in_flight=st.none() | st.lists(st.integers(1, 4), min_size=4, max_size=4),
    updates=st.integers(1, 3),
    longer=st.integers(0, 20),
    skips=st.booleans(),
)
def test_ranks_that_stand_a_window_before_the_place_have_done_nothing_else(
    name: ScheduleName,
    replicas: list[int],
    size: int,
    max_in_flight: list[int] | None,
    updates: int,
    longer: int,
    skips: bool,
) -> None:
    """Whatever a rank has done or begun, if it has touched no minibatch of the last window before
    the place, is how the shorter segment begins on that rank.
    """
    stages = len(replicas)
    links = [(s, s + 1) for s in range(stages - 1)] + [(0, stages - 1)] * (skips and stages > 2)
    numbers = {"microbatches": size, "max_in_flight": max_in_flight and max_in_flight[:stages]}
    if name in ("weight-stashing", "vertical-sync"):
        numbers |= {"microbatches": 1, "accumulate": size}
    rules = policy(name, replicas, **numbers)
    end = whole_updates(window(rules) + updates * whole_updates(1, rules), rules)
    whole = schedule(name, replicas, links, end + longer, **numbers)
    shorter = schedule(name, replicas, links, end, **numbers)
    for worker in whole.workers:
        actions = whole.actions(worker)
        far = (n for n, a in enumerate(actions) if a.minibatch >= end - window(rules))
        begun = next(far, len(actions))
        assert shorter.actions(worker)[:begun] == actions[:begun]

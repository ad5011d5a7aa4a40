"""The mean of the slowest, against the mean over all cases there are, one by one."""

from itertools import product
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedream.optimizer.cost.expected_time import expected_slowest, in_a_run


def over_all_cases(seconds, workers, spread):
    each = [s for s, count in zip(seconds, workers, strict=True) for _ in range(count)]
    steady = [s for s, count in zip(seconds, workers, strict=True) if not count]
    cases = product(spread, repeat=len(each))
    return fmean(max([*(s * f for s, f in zip(each, c, strict=True)), *steady]) for c in cases)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 1.3]), st.integers(0, 2)), min_size=1)
    .filter(lambda stages: sum(count for _, count in stages) <= 5)
    .map(lambda stages: stages[:3]),
    st.lists(st.sampled_from([0.8, 1.0, 1.05, 1.7]), min_size=1, max_size=4),
)
def test_it_is_the_mean_over_all_cases(stages, spread):
    seconds, workers = zip(*stages, strict=True)
    found = expected_slowest(seconds, workers, spread)
    assert found == pytest.approx(over_all_cases(seconds, workers, spread))


def test_two_replicas_wait_for_each_other():
    """One pass in two takes 2 s, not 1 s: alone 1.5 s, but three rounds of four have a slow one."""
    assert expected_slowest([1.0], [1], [1.0, 2.0]) == 1.5
    assert expected_slowest([1.0], [2], [1.0, 2.0]) == 1.75


def test_a_stage_with_time_to_spare_delays_nobody():
    assert expected_slowest([1.0, 0.4], [1, 8], [1.0, 2.0]) == 1.5


def test_what_messages_set_is_steady():
    assert in_a_run([(1.0, "boundary"), (0.2, "compute")], [2, 2], [0.5, 1.0, 3.0]) == 1.0
    assert in_a_run([(1.0, "all-reduce")], [1], [1.0, 3.0]) == 2.0


def test_without_a_spread_nothing_is_said():
    assert in_a_run([(1.0, "compute")], [2], ()) is None

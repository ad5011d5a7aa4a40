"""Ranks of stages; the mean of the slowest, against the mean over all cases, one by one."""

from itertools import product
from statistics import fmean

import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost.stage_time import expected_slowest, in_a_run, ranks
from pipedream.optimizer.cost.stages import NestedStage, Share

FOUR_TWO = Cluster(machines=(4, 2), bandwidth=(1e10, 1e9))


def stage(*shares):
    """(offset, replicas) of each level, innermost first."""
    return NestedStage(
        tuple(
            Share(level, 0, 1, offset, replicas, False)
            for level, (offset, replicas) in enumerate(shares, start=1)
        )
    )


def test_rank_5_is_device_1_of_machine_1():
    assert ranks(stage((1, 1), (1, 1)), FOUR_TWO) == (5,)


def test_a_stage_has_the_same_devices_in_each_of_its_machines():
    assert sorted(ranks(stage((1, 3), (0, 2)), FOUR_TWO)) == [1, 2, 3, 5, 6, 7]


def test_stages_that_share_machines_keep_each_minibatch_inside_one():
    first = ranks(stage((0, 1), (0, 2)), FOUR_TWO)
    second = ranks(stage((1, 3), (0, 2)), FOUR_TWO)
    assert first == (0, 4)
    assert second == (1, 5, 2, 6, 3, 7)
    for minibatch in range(12):
        machine = first[minibatch % 2] // 4
        assert second[minibatch % 6] // 4 == machine


def test_three_levels_keep_each_minibatch_inside_too():
    cluster = Cluster(machines=(4, 3, 2), bandwidth=(1e10, 1e9, 1e8))
    first = ranks(stage((0, 1), (1, 2), (0, 2)), cluster)
    second = ranks(stage((1, 3), (1, 2), (0, 2)), cluster)
    assert sorted(first) == [4, 8, 16, 20]
    for minibatch in range(36):
        assert first[minibatch % 4] // 4 == second[minibatch % 12] // 4


def over_all_cases(seconds, workers, spread):
    each = [s for s, count in zip(seconds, workers, strict=True) for _ in range(count)]
    steady = [s for s, count in zip(seconds, workers, strict=True) if not count]
    cases = product(spread, repeat=len(each))
    return fmean(max([*(s * f for s, f in zip(each, c, strict=True)), *steady]) for c in cases)


@settings(max_examples=examples(200), deadline=None)
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

"""How many minibatches are in flight, against hand-worked pipelines and a formula of its own."""

from __future__ import annotations

import itertools
from math import gcd

import pytest

from pipedream.schedule.in_flight import StageTimes, steady_in_flight, useful_in_flight, warm_up


@pytest.mark.parametrize("synchronized", [True, False])
def test_of_equal_work_a_worker_goes_backward_right_after_another_forward_pass(
    synchronized: bool,
) -> None:
    """Then d rounds of r minibatches go by in between, d r >= e q + q for e at the next stage of q,
    and with all replicas in step q - g and r - g more.
    """
    for stages in range(1, 5):
        for replicas in itertools.product(range(1, 5), repeat=stages):
            found = [1] * stages
            for stage in range(stages - 2, -1, -1):
                here, behind = replicas[stage : stage + 2]
                apart = here + behind - 2 * gcd(here, behind) if synchronized else 0
                found[stage] = 1 - (-(found[stage + 1] * behind + apart) // here)
            assert steady_in_flight(replicas, synchronized) == tuple(found)


def test_of_one_replica_each_it_is_pipedreams_number() -> None:
    assert steady_in_flight((1, 1, 1, 1), True) == (4, 3, 2, 1)
    assert [warm_up((1, 1, 1, 1), stage) for stage in range(4)] == [4, 3, 2, 1]


def room(pace: StageTimes, replicas: tuple[int, ...] = (1, 1)) -> tuple[int, ...]:
    links = [(stage, stage + 1) for stage in range(len(replicas) - 1)]
    return useful_in_flight(replicas, pace, links, synchronized=True)


def test_a_slow_message_takes_one_more() -> None:
    """Forward 1, backward 2 on each, a minibatch every 3:

    0  F0     F1       F2       B0 ...      with messages of 1: F0 ends at 1, arrives at 2,
    1      F0 B0 B0 F1 ...                  goes backward until 5, is back at 6, after F2
    """
    pace = StageTimes(3.0, (1.0, 1.0), (2.0, 2.0), (0.0, 0.0))
    assert room(pace) == (2, 1)
    slow = StageTimes(3.0, (1.0, 1.0), (2.0, 2.0), (0.0, 0.0), {(0, 1): 1.0}, {(0, 1): 1.0})
    assert room(slow) == (3, 1)


def test_a_stage_with_time_left_waits_for_its_gradient_instead() -> None:
    """Stage 0 is done in 1 of 3: what comes back after 2.6 meets no forward pass."""
    pace = StageTimes(3.0, (0.3, 1.0), (0.4, 1.3), (0.0, 0.0))
    assert room(pace) == (1, 1)
    assert room(StageTimes(3.0, (0.3, 1.0), (0.4, 1.3), (0.0, 0.7))) == (1, 1)
    assert room(StageTimes(3.0, (0.3, 1.0), (0.4, 1.7), (0.0, 0.0))) == (2, 1)


def test_a_stage_on_a_branch_begins_no_sooner_than_it_must() -> None:
    """Stage 1 reads the data alone, and only the last stage reads from it: two in flight do."""
    pace = StageTimes(2.0, (1.0,) * 4, (1.0,) * 4, (0.0,) * 4)
    assert useful_in_flight((1,) * 4, pace, [(0, 2), (1, 3), (2, 3)], synchronized=True) == (
        3,
        2,
        2,
        1,
    )

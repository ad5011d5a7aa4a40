"""Times of nodes from sums over stages: what one run says, and what several do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.optimizer.calibrate.correction import Observation, calibrate

TIMES = np.array([1.0, 2.0, 0.0, 3.0, 4.0])


def seen(truth, *stages):
    """The sums of these nodes' true times, sure to a hundredth."""
    return [observed(nodes, float(truth[list(nodes)].sum())) for nodes in stages]


def observed(nodes, seconds, error=0.01):
    return Observation(tuple(nodes), seconds, error * seconds)


def test_of_one_run_stages_add_up_and_their_nodes_share_a_factor():
    found = calibrate(TIMES, [observed((0, 1, 2), 6.0), observed((3, 4), 3.5)])
    assert found == pytest.approx([2.0, 4.0, 0.0, 1.5, 2.0], rel=1e-12)


def test_a_sum_that_is_less_sure_is_met_all_the_same_where_nothing_else_is_known():
    found = calibrate(TIMES, [observed((0, 1, 2), 6.0, error=0.5), observed((3, 4), 70.0)])
    assert found == pytest.approx([2.0, 4.0, 0.0, 30.0, 40.0], rel=1e-12)


def test_two_cuts_tell_what_lies_between_them():
    """Node 1 takes three times as long as profiled: neither run alone can say that it is it."""
    truth = TIMES * [1.0, 3.0, 1.0, 1.0, 1.0]
    alone = calibrate(TIMES, seen(truth, (0, 1, 2), (3, 4)))
    assert alone[0] == pytest.approx(7 / 3)
    found = calibrate(TIMES, seen(truth, (0, 1, 2), (3, 4)) + seen(truth, (0,), (1, 2, 3, 4)))
    assert found == pytest.approx(truth, rel=0.02)


def test_runs_that_disagree_are_met_in_the_middle():
    found = calibrate(TIMES, [observed((0, 1), 3.0), observed((0, 1), 3.3)])
    assert found[:2].sum() == pytest.approx((3.0 * 3.3) ** 0.5, rel=1e-6)
    nearer = calibrate(TIMES, [observed((0, 1), 3.0), observed((0, 1), 3.3, error=0.1)])
    assert 3.0 < nearer[:2].sum() < 3.02


def test_what_two_runs_happen_to_differ_by_is_not_put_on_a_small_node():
    """Of some 10 ms each two stages differ by 0.2, and by a node of 0.01: not twenty of that."""
    times = np.array([10.0, 0.01, 10.0])
    runs = [observed((0, 1), 10.2), observed((2,), 10.0), observed((0,), 10.0)]
    found = calibrate(times, [*runs, observed((1, 2), 10.0)])
    assert 0.005 < found[1] < 0.02
    less = calibrate(times, [observed((0, 1), 9.8), observed((2,), 10.0), observed((0,), 10.0)])
    assert less[1] > 0.005


def test_what_was_timed_badly_is_corrected_more():
    """Three pieces, two sums: the first and the second may each be what was wrong."""
    times = np.array([5.0, 5.0, 5.0])
    sums = [observed((0, 1), 10.0), observed((1, 2), 14.0)]
    steady = calibrate(times, sums)
    unsteady = calibrate(times, sums, np.array([0.0, 0.0, 4.0]))
    assert unsteady[2] > steady[2] > 5.0
    assert unsteady[1:].sum() == pytest.approx(14.0, rel=0.02)


def test_nothing_is_learned_from_stages_that_take_no_time():
    sums = [observed((2,), 1.0), Observation((0, 1), 0.0, 0.0)]
    assert calibrate(TIMES, sums) == pytest.approx(TIMES, abs=0)
    found = calibrate(TIMES, [*sums, observed((3, 4), 14.0)])
    assert found == pytest.approx([1.0, 2.0, 0.0, 6.0, 8.0])


@st.composite
def runs(draw):
    """Times with some that are zero, what they really are, and the cuts of some runs."""
    count = draw(st.integers(2, 12))
    times = draw(
        st.lists(st.sampled_from([0.0, 1e-6, 1e-3, 2e-3, 0.1]), min_size=count, max_size=count)
    )
    factors = draw(st.lists(st.floats(0.2, 5.0), min_size=count, max_size=count))
    cuts = st.lists(st.integers(1, count - 1), unique=True, min_size=1, max_size=4).map(sorted)
    return np.array(times), np.array(factors), draw(st.lists(cuts, min_size=1, max_size=4))


def stages(count, cuts):
    return [range(begin, end) for begin, end in zip([0, *cuts], [*cuts, count], strict=True)]


@given(runs())
def test_whatever_was_measured_times_stay_positive_and_sums_are_met(drawn):
    times, factors, cuts_of_runs = drawn
    truth = times * factors
    pieces = [nodes for cuts in cuts_of_runs for nodes in stages(len(times), cuts)]
    found = calibrate(times, seen(truth, *pieces))
    assert (found[times > 0] > 0).all()
    assert (found[times == 0] == 0).all()
    same = all(cuts == cuts_of_runs[0] for cuts in cuts_of_runs)
    for nodes in pieces:
        wanted = pytest.approx(truth[list(nodes)].sum(), rel=1e-9 if same else 0.03)
        assert found[list(nodes)].sum() == wanted


@given(runs(), st.lists(st.floats(0.01, 100.0), min_size=20, max_size=20))
def test_sums_that_contradict_each_other_leave_times_that_are_times(drawn, noise):
    times, _, cuts_of_runs = drawn
    pieces = [nodes for cuts in cuts_of_runs for nodes in stages(len(times), cuts)]
    sums = [observed(nodes, factor) for nodes, factor in zip(pieces, noise, strict=False)]
    found = calibrate(times, sums)
    assert np.isfinite(found).all()
    assert (found >= 0).all()

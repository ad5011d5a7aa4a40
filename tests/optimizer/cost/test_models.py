"""The formulas of the design ("Numbers that must agree"), with figures worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.graph.cluster import Link
from pipedream.optimizer.cost.models import (
    COST_MODELS,
    LevelLinks,
    MeasuredCost,
    NetworkCost,
    PaperCost,
    ReleasedCost,
    Work,
)

# C' = 6 s, W = 90 B, a_in = 40 B, a_out = 100 B, B = 10 B/s, q = 4; a message takes 0.5 s more, a
# step of a ring 1 s.
WORK = Work(np.array([[6.0]]), np.array([90.0]), 40.0, np.array([100.0]))
LEVEL = LevelLinks(
    bandwidth=10.0,
    inner_machines=4,
    inner_devices=4,
    link=Link(latency=0.5, bandwidth=10.0),
    ring=Link(latency=1.0, bandwidth=10.0),
)


def seconds(model, replicas, first):
    terms = model.terms(WORK, LEVEL, np.array([[replicas]]), first)
    return model.seconds(terms).item(), model.limit(terms)


@pytest.mark.parametrize(
    ("model", "replicas", "first", "expected"),
    [
        (PaperCost(), 1, True, (6.0, "compute")),
        (PaperCost(), 3, True, (12.0, "all-reduce")),  # 2 * 2 * 90/10 = 36 over 3
        (PaperCost(), 1, False, (8.0, "boundary")),  # 2 * 40/10, whatever the replicas
        (PaperCost(), 2, False, (9.0, "all-reduce")),
        (PaperCost(compression=4.0), 1, False, (6.0, "compute")),
        (ReleasedCost(), 1, True, (6.0, "compute")),
        (ReleasedCost(), 3, True, (4.0, "compute")),  # (6 + 4*2*90/(10*3)/4)/3
        (ReleasedCost(), 3, False, (10.0, "all-reduce")),  # (6 + 24)/3
        (ReleasedCost(), 1, False, (6.0, "compute")),  # boundaries are free without a ratio
        (ReleasedCost(compression=1.0), 1, False, (20.0, "boundary")),  # 2 * 100/10
        (ReleasedCost(compression=1.0), 1, True, (6.0, "compute")),  # the first does not pay
        (ReleasedCost(compression=1.0), 2, False, (12.0, "all-reduce")),  # (6 + 18)/2 above 20/2
        (ReleasedCost(compression=4.0), 1, False, (6.0, "compute")),
        (MeasuredCost(), 1, True, (15.0, "boundary")),  # 0.5 + 40/10 + 0.5 + 100/10
        (MeasuredCost(), 2, True, (8.5, "all-reduce")),  # (6 + 2 * (1 + 45/10))/2 above 15/2
        (MeasuredCost(compression=4.0), 1, False, (6.0, "compute")),  # above 0.5 + 1 + 0.5 + 2.5
        (NetworkCost(), 1, True, (15.0, "boundary")),  # 0.5 + 40/10 + 0.5 + 100/10
        # One bucket, so none of the sum is hidden: 6/2 + 2 * (1 + 45/10) / (2 * 4 devices).
        (NetworkCost(), 2, True, (7.5, "boundary")),
        (NetworkCost(), 3, False, (5.0, "boundary")),
        # Once per 4 minibatches: 6/3 + 2 * 2 * (1 + 30/10) / 4.
        (NetworkCost().in_rounds(4), 3, False, (6.0, "all-reduce")),
    ],
)
def test_formulas(model, replicas, first, expected):
    assert seconds(model, replicas, first) == (pytest.approx(expected[0]), expected[1])


def test_all_replica_counts_in_one_question():
    inner = np.array([[6.0, 7.0], [6.0, 7.0]])
    work = Work(inner, np.array([0.0, 0.0]), 0.0, np.array([0.0, 0.0]))
    for model in (PaperCost(), ReleasedCost(), MeasuredCost()):
        terms = model.terms(work, LEVEL, np.array([[1], [2]]), first=False)
        assert model.seconds(terms).tolist() == [[6.0, 7.0], [3.0, 3.5]]


def test_models_by_name():
    assert {name: model().name for name, model in COST_MODELS.items()} == {
        "network": "network",
        "paper": "paper",
        "released": "released",
        "measured": "measured",
    }


def test_no_message_takes_no_time():
    work = Work(np.array([[6.0]]), np.array([0.0]), 0.0, np.array([100.0]))
    terms = MeasuredCost().terms(work, LEVEL, np.array([[1]]), False)
    assert terms.boundary.item() == pytest.approx(10.5)


AMOUNT = st.floats(0, 1e6)
LINK = st.one_of(
    st.builds(Link, latency=st.floats(0, 1), bandwidth=st.floats(1e-3, 1e6)),
    st.builds(
        lambda sizes, times: Link(points=tuple(zip(sizes, times, strict=True))),
        st.lists(st.integers(1, 10**6), min_size=3, max_size=3, unique=True).map(sorted),
        st.lists(st.floats(0, 10), min_size=3, max_size=3).map(sorted),
    ),
)


@given(
    model=st.sampled_from([m(c) for m in COST_MODELS.values() for c in (None, 1.0, 4.0)]),
    level=st.builds(
        LevelLinks, st.floats(1e-3, 1e6), st.integers(1, 8), st.integers(1, 8), LINK, LINK
    ),
    pairs=st.lists(st.tuples(AMOUNT, AMOUNT).map(sorted), min_size=4, max_size=4),
    replicas=st.integers(1, 9),
    first=st.booleans(),
)
def test_costs_grow_with_the_work_and_replicas_share_it_at_best(
    model, level, pairs, replicas, first
):
    less, more = (
        Work(np.array([[inner]]), np.array([weights]), into, np.array([out]))
        for inner, weights, into, out in zip(*pairs, strict=True)
    )
    count = np.array([[replicas]])
    cheap, dear = (model.seconds(model.terms(w, level, count, first)) for w in (less, more))
    assert cheap.item() <= dear.item() * (1 + 1e-12)
    assert cheap.item() >= less.inner_seconds.item() / replicas * (1 - 1e-12)

"""The formulas of the design ("Numbers that must agree"), with figures worked out by hand."""

import numpy as np
import pytest

from pipedream.optimizer.cost import COST_MODELS, Level, Paper, Released, Work

# C' = 6 s, W = 90 B, a_in = 40 B, a_out = 100 B, B = 10 B/s, q = 4.
WORK = Work(np.array([[6.0]]), np.array([90.0]), 40.0, np.array([100.0]))
LEVEL = Level(bandwidth=10.0, inner_machines=4)


def seconds(model, replicas, first):
    terms = model.terms(WORK, LEVEL, np.array([[replicas]]), first)
    return model.seconds(terms).item(), model.limit(terms)


@pytest.mark.parametrize(
    ("model", "replicas", "first", "expected"),
    [
        (Paper(), 1, True, (6.0, "compute")),
        (Paper(), 3, True, (12.0, "all-reduce")),  # 2 * 2 * 90/10 = 36 over 3
        (Paper(), 1, False, (8.0, "boundary")),  # 2 * 40/10, whatever the replicas
        (Paper(), 2, False, (9.0, "all-reduce")),
        (Paper(compression=4.0), 1, False, (6.0, "compute")),
        (Released(), 1, True, (6.0, "compute")),
        (Released(), 3, True, (4.0, "compute")),  # (6 + 4*2*90/(10*3)/4)/3
        (Released(), 3, False, (10.0, "all-reduce")),  # (6 + 24)/3
        (Released(), 1, False, (6.0, "compute")),  # boundaries are free without a ratio
        (Released(compression=1.0), 1, False, (20.0, "boundary")),  # 2 * 100/10
        (Released(compression=1.0), 1, True, (6.0, "compute")),  # the first does not pay
        (Released(compression=1.0), 2, False, (12.0, "all-reduce")),  # (6 + 18)/2 above 20/2
        (Released(compression=4.0), 1, False, (6.0, "compute")),
    ],
)
def test_formulas(model, replicas, first, expected):
    assert seconds(model, replicas, first) == (pytest.approx(expected[0]), expected[1])


def test_all_replica_counts_in_one_question():
    inner = np.array([[6.0, 7.0], [6.0, 7.0]])
    work = Work(inner, np.array([0.0, 0.0]), 0.0, np.array([0.0, 0.0]))
    for model in (Paper(), Released()):
        terms = model.terms(work, LEVEL, np.array([[1], [2]]), first=False)
        assert model.seconds(terms).tolist() == [[6.0, 7.0], [3.0, 3.5]]


def test_models_by_name():
    assert {name: model().name for name, model in COST_MODELS.items()} == {
        "paper": "paper",
        "released": "released",
    }

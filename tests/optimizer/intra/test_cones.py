"""Clusters of operators that are divided as their last one is."""

from __future__ import annotations

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_problems import brute_force, made_up

from pipedream.optimizer.intra.cones import cones
from pipedream.optimizer.intra.solver.exact import solve
from pipedream.optimizer.intra.solver.problem import Problem, Value


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 8), st.booleans())
def test_what_is_found_is_a_choice_of_the_whole(seed: int, variables: int, limited: bool) -> None:
    """It takes what the smaller problem says, and no less than the best."""
    problem = made_up(seed, variables, limited)
    joined = cones(problem)
    choice = solve(joined.problem)
    if choice.labels is None:
        return
    amounts = problem.amounts(joined.expanded(choice.labels))
    assert amounts.seconds == pytest.approx(choice.seconds)
    assert amounts.seconds >= brute_force(problem) - 1e-12


def row(*tables: list[list[float]]) -> Problem:
    """Variables of two labels in a row, each of which reads the one before."""
    both, count = np.arange(2), len(tables) + 1
    values = [
        Value(k, both, (k + 1,), (both,), np.array(t), (False,), np.zeros(2), np.zeros(2), both)
        for k, t in enumerate(tables)
    ]
    return Problem([np.zeros(2)] * count, [np.zeros(2)] * count, values)


def test_a_row_of_operators_is_one_cone() -> None:
    """But for the last, which nobody reads, and one that makes less of what it reads."""
    large, small = [[0.0, 3.0], [0.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]]
    assert list(cones(row(small, small)).of) == [0, 0, 0]
    assert list(cones(row(large, small)).of) == [0, 0, 1]


def test_where_it_costs_the_same_a_tensor_is_divided_already() -> None:
    """Whoever has the whole can take its part at no cost, but then all that is before it is whole:
    cones took three times as long as the best.
    """
    free = [[0.0, 0.0], [2.0, 0.0]]
    joined = cones(row(free, free))
    assert [list(own) for own in joined.labels] == [[0, 1]] * 3

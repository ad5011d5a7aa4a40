"""The exact solver against all choices one by one, and against HiGHS on the whole problem."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_problems import brute_force, made_up

from pipedream.optimizer.intra.solver import building, messages
from pipedream.optimizer.intra.solver.elimination import eliminate
from pipedream.optimizer.intra.solver.exact import solve
from pipedream.optimizer.intra.solver.integer import integer_program


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7), st.booleans())
def test_equals_all_choices_one_by_one(seed, variables, limited):
    problem = made_up(seed, variables, limited)
    best = brute_force(problem)
    choice = solve(problem)
    assert choice.seconds == pytest.approx(best, rel=1e-9, abs=1e-15)
    assert choice.bound <= best * (1 + 1e-9) + 1e-15
    assert choice.proven or best == np.inf
    if choice.labels is not None:
        assert problem.amounts(choice.labels).seconds == choice.seconds


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(6, 12), st.booleans())
def test_equals_the_integer_program(seed, variables, limited):
    problem = made_up(seed, variables, limited)
    solution = integer_program(problem)
    choice = solve(problem)
    assert choice.seconds == pytest.approx(
        np.inf if solution.labels is None else problem.amounts(solution.labels).seconds, rel=1e-7
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.floats(0, 2e-6))
def test_elimination_and_messages_agree_at_any_price(seed, variables, price):
    problem = made_up(seed, variables, limited=False)
    labels = eliminate(problem, price)
    seconds, held = problem.amounts(labels)
    best = seconds + price * held
    known = messages.Messages.of(problem, price)
    bounds = []
    for _ in range(5):
        known.sweep(4)
        bounds.append(known.bound())
    assert bounds == sorted(bounds) or np.diff(bounds).min() > -1e-12
    assert bounds[-1] <= best * (1 + 1e-9) + 1e-15
    least = np.split(known.least(), np.cumsum([len(own) for own in problem.seconds])[:-1])
    chosen = (own[label] for own, label in zip(least, labels, strict=True))
    assert all(each <= best * (1 + 1e-9) + 1e-15 for each in chosen)


def test_values_with_many_readers_are_several_factors(monkeypatch):
    """A bound from parts of its seconds is still a bound, and elimination closes the gap."""
    monkeypatch.setattr(building, "MOST_READERS", 2)
    for seed in range(20):
        problem = made_up(seed, 6, limited=False)
        best = brute_force(problem)
        choice = solve(problem)
        assert choice.seconds == pytest.approx(best, rel=1e-9)
        assert choice.bound <= best * (1 + 1e-9)

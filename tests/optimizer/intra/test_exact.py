"""The exact solver against all choices one by one, and against HiGHS on the whole problem."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedream.optimizer.intra import messages
from pipedream.optimizer.intra.elimination import eliminate
from pipedream.optimizer.intra.exact import solve
from pipedream.optimizer.intra.integer import integer_program
from pipedream.optimizer.intra.problem import Problem, Value


def made_up(seed: int, variables: int, limited: bool, keeps: bool = True) -> Problem:
    """A problem of operators in a row, each of which reads some values of those before it."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, variables)
    seconds = [rng.integers(0, 20, size) * 1e-6 for size in sizes]
    held = [rng.integers(0, 9, size).astype(float) for size in sizes]
    values = []
    for source in range(variables - 1):
        later = np.arange(source + 1, variables)
        readers = sorted(rng.choice(later, min(len(later), rng.integers(1, 5)), replace=False))
        given, wanted = rng.integers(1, 4, 2)
        table = rng.integers(0, 15, (given, wanted)) * 1e-6
        same = np.full(given, -1)
        if rng.random() < 0.7:
            same[0] = 0
            table[0, 0] = 0.0
        kept = rng.integers(0, 9, given) * float(keeps)
        values.append(
            Value(
                source,
                rng.integers(0, given, sizes[source]),
                tuple(map(int, readers)),
                tuple(rng.integers(0, wanted, sizes[reader]) for reader in readers),
                table,
                tuple(bool(each) for each in rng.random(len(readers)) < 0.5),
                kept.astype(float),
                rng.integers(0, 9, wanted) * float(keeps),
                same,
            )
        )
    limit = None
    if limited:
        some = Problem(seconds, held, values)
        amounts = [some.amounts(rng.integers(0, sizes)).bytes for _ in range(5)]
        limit = float(min(amounts))
    return Problem(seconds, held, values, limit)


def brute_force(problem: Problem) -> float:
    """The least seconds within the limit; infinite if nothing keeps it."""
    limit = np.inf if problem.limit is None else problem.limit
    choices = product(*(range(len(own)) for own in problem.seconds))
    amounts = (problem.amounts(labels) for labels in choices)
    return min((each.seconds for each in amounts if each.bytes <= limit), default=np.inf)


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
    monkeypatch.setattr(messages, "MOST_READERS", 2)
    for seed in range(20):
        problem = made_up(seed, 6, limited=False)
        best = brute_force(problem)
        choice = solve(problem)
        assert choice.seconds == pytest.approx(best, rel=1e-9)
        assert choice.bound <= best * (1 + 1e-9)

"""A problem without what is ruled out: the same choices, and a bound that is no lower."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_problems import ladder, made_up

from pipedream.optimizer.intra.solver import exact, relaxed
from pipedream.optimizer.intra.solver.elimination import eliminate
from pipedream.optimizer.intra.solver.messages import Messages
from pipedream.optimizer.intra.solver.narrowing import narrow


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9), st.floats(0, 2e-6))
def test_what_is_left_costs_the_same_and_knows_as_much(seed, variables, price):
    random = np.random.default_rng(seed)
    problem = made_up(seed, variables, limited=False)
    messages = Messages.of(problem, price)
    messages.sweep(3)
    alive = [np.flatnonzero(random.random(len(own)) < 0.6) for own in problem.seconds]
    alive = [own if len(own) else np.array([0]) for own in alive]
    narrowed = narrow(problem, alive)
    for _ in range(5):
        labels = np.array([random.integers(len(own)) for own in alive])
        original = np.array([own[label] for own, label in zip(alive, labels, strict=True)])
        assert narrowed.problem.amounts(labels) == problem.amounts(original)
    left = Messages.of(narrowed.problem, price)
    left.continue_from_narrowed(narrowed, messages)
    assert left.bound() >= messages.bound() * (1 - 1e-9)
    begin = np.cumsum([0, *map(len, problem.seconds)])
    kept = np.concatenate([first + own for first, own in zip(begin, alive, strict=False)])
    possible = np.isfinite(np.concatenate(narrowed.problem.seconds))
    there, here = messages.unary[kept] * messages.unit, left.unary * left.unit
    assert here[possible] == pytest.approx(there[possible], abs=1e-9 * messages.unit)
    for value, own in zip(narrowed.problem.values, problem.values, strict=True):
        assert value.seconds.size <= own.seconds.size


def test_nothing_better_is_ruled_out(monkeypatch):
    """Messages alone, without elimination and an integer program: of GPT-2's 24 layers on 8 x 8
    devices elimination was too large for what they left, until they were passed in what was left.
    """
    sizes = []

    def counted(problem, alive):
        sizes.append((sum(map(len, alive)), sum(map(len, problem.seconds))))
        return narrow(problem, alive)

    monkeypatch.setattr(relaxed, "narrow", counted)
    monkeypatch.setattr(relaxed, "eliminate", lambda problem, price: None)
    monkeypatch.setattr(exact, "_SWEEPS", 1)
    monkeypatch.setattr(relaxed, "_SETTLED", np.inf)
    for seed in range(6):
        problem = ladder(seed)
        found = eliminate(problem, 0.0)
        assert found is not None
        best, choice = problem.amounts(found).seconds, exact.solve(problem)
        assert choice.proven
        assert choice.seconds == pytest.approx(best, rel=1e-9)
    assert len(sizes) > 6
    assert all(less < 0.8 * before for less, before in sizes)

"""Labels that are decided one after the other, where messages miss the best."""

from __future__ import annotations

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_problems import brute_force, ladder, made_up

from pipedream.optimizer.intra.solver import branching, exact, relaxed
from pipedream.optimizer.intra.solver.branching import Branching
from pipedream.optimizer.intra.solver.elimination import eliminate
from pipedream.optimizer.intra.solver.messages import Messages
from pipedream.optimizer.intra.solver.problem import Problem, Value


def with_loop(problem: Problem, weight: float = 1.0) -> Problem:
    """With two more variables, around which costs cannot all be kept away from. Half of either
    label each costs nothing; so messages do not see what the loop costs.

        v0 -(unlike costs)- a -(unlike costs)- b -(alike costs)- v0      of two labels each
    """
    first = len(problem.seconds)
    own, nothing, same = np.arange(2), np.zeros(2), np.full(2, -1)
    alone = np.eye(2, dtype=np.bool_)
    unlike, alike = np.where(alone, 0.0, weight), np.where(alone, weight, 0.0)
    of_first = np.arange(len(problem.seconds[0])) % 2

    def value(ends, given, wanted, costs):
        return Value(ends[0], given, (ends[1],), (wanted,), costs, (False,), nothing, nothing, same)

    values = [
        value((0, first), of_first, own, unlike),
        value((first, first + 1), own, own, unlike),
        value((0, first + 1), of_first, own, alike),
    ]
    seconds = [*problem.seconds, nothing, nothing]
    return Problem(seconds, [np.zeros(len(each)) for each in seconds], [*problem.values, *values])


@pytest.fixture
def by_messages(monkeypatch):
    """Without elimination, in small parts."""
    monkeypatch.setattr(relaxed, "eliminate", lambda problem, price: None)
    monkeypatch.setattr(branching, "_PART", 6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(4))
def test_a_loop_at_one_end_is_decided(by_messages, seed):
    """Llama's stage of 32 layers on 8 x 8 devices was not proven in half a minute: what messages
    missed was all between an embedding and its gradient, and elimination too large for the rest.
    """
    problem = with_loop(ladder(seed))
    found = eliminate(problem)
    best, choice = problem.amounts(found).seconds, exact.solve(problem)
    assert choice.proven
    assert choice.seconds == pytest.approx(best, rel=1e-9)
    messages = Messages.of(problem)
    messages.sweep(200)
    assert messages.bound() < best - 0.5
    own, joint = messages.excess(choice.labels)
    assert own.sum() + joint.sum() == pytest.approx(best - messages.bound(), rel=1e-9)
    spot = max(range(len(joint)), key=joint.__getitem__)
    assert set(messages.members(spot)) & {200, 201}


def test_messages_pass_near_what_was_decided_first(by_messages, monkeypatch):
    """All of what the loop costs is proven by the few variables around it."""
    sizes = []
    sweep = Messages.sweep

    def counted(messages, count, part=None):
        sizes.append(len((part or messages.whole).variables))
        sweep(messages, count, part)

    monkeypatch.setattr(Messages, "sweep", counted)
    assert exact.solve(with_loop(ladder(0))).proven
    assert set(sizes[:-2]) == {202}
    assert sizes[-2:] == [6, 6], "for each of two labels"


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7))
def test_equals_all_choices_one_by_one(seed, variables):
    problem = with_loop(made_up(seed, variables, limited=False), 5e-6)
    best = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relaxed, "eliminate", lambda problem, price: None)
        patch.setattr(branching, "_PART", 2)
        choice = exact.solve(problem)
    assert choice.proven
    assert choice.seconds == pytest.approx(best, rel=1e-9, abs=1e-15)
    assert problem.amounts(choice.labels).seconds == choice.seconds


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6))
def test_decided_labels_leave_the_others_what_they_take(seed, variables):
    """Each choice is in one of the problems in which a variable has one of its labels."""
    problem = made_up(seed, variables, limited=False)
    random = np.random.default_rng(seed)
    messages = Messages.of(problem)
    messages.sweep(2)
    variable = int(random.integers(variables))
    bests = []
    for label in range(len(problem.seconds[variable])):
        alive = [np.arange(len(own)) for own in problem.seconds]
        alive[variable] = np.array([label])
        bests.append(brute_force(problem.restricted(alive)))
        decided = messages.decided(variable, label)
        part = decided.part(random.permutation(variables)[: variables // 2 + 1])
        before = decided.bound(), decided.bound(part)
        assert before[0] >= messages.bound() - 1e-15
        decided.sweep(3, part)
        after = decided.bound(), decided.bound(part)
        assert after[0] - before[0] == pytest.approx(after[1] - before[1], abs=1e-15)
        assert before[0] - 1e-15 <= after[0] <= bests[-1] + 1e-15
        labels = decided.labels(part, decided.labels())
        assert labels[variable] == label
        taken = decided.taken(labels, decided.whole)
        assert taken == pytest.approx(problem.amounts(labels).seconds, abs=1e-15)
    assert min(bests) == pytest.approx(brute_force(problem), abs=1e-15)


def test_no_choice_of_a_node_takes_less_than_its_bound(by_messages, monkeypatch):
    """What messages near it gain is added to what they knew, not to what ruled out its label."""
    monkeypatch.setattr(branching, "_PART", 1)
    pass_near, found = Branching._pass_near, []

    def noted(its, node):
        decision = node.decision
        pass_near(its, node)
        if decision is not None and len(node.decided) == 1:
            found.append((its.problem, decision, node.bound))

    monkeypatch.setattr(Branching, "_pass_near", noted)
    monkeypatch.setattr(Branching, "_worst", lambda its, node: [0])
    for seed in range(60):
        problem = with_loop(made_up(seed, 8, limited=False), 5e-6)
        messages = Messages.of(problem)
        messages.sweep(1)
        known = relaxed.Relaxed(messages, lambda labels, of=problem: of.amounts(labels).seconds)
        known.improve(0.0)
        Branching(problem, known.seconds, np.inf).begin(known)
    assert len(found) > 60
    for problem, (variable, label), bound in found:
        alive = [np.arange(len(own)) for own in problem.seconds]
        alive[variable] = np.array([label])
        labels = eliminate(problem.restricted(alive))
        assert bound <= problem.restricted(alive).amounts(labels).seconds + 1e-14


def test_out_of_time_the_bound_is_still_one(by_messages, monkeypatch):
    problem = with_loop(ladder(1))
    best = problem.amounts(eliminate(problem)).seconds
    monkeypatch.setattr(branching, "monotonic", lambda: np.inf)
    choice = exact.solve(problem)
    assert not choice.proven
    assert choice.bound <= best * (1 + 1e-9) <= choice.seconds * (1 + 2e-9)


def test_nothing_possible_is_no_error(by_messages):
    """Redistributions that cannot be, all around a loop."""
    problem = with_loop(ladder(2, length=10), np.inf)
    choice = exact.solve(problem, 2.0)
    assert choice.seconds == np.inf
    assert choice.labels is None

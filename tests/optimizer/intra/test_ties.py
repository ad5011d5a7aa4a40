"""Layers that are equal get equal labels, at a cost that is never below that of the free ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_up_problems import brute_force, made_up

from pipedream.optimizer.intra.solver import exact
from pipedream.optimizer.intra.solver.exact import solve
from pipedream.optimizer.intra.solver.integer import integer_program
from pipedream.optimizer.intra.solver.joining import join
from pipedream.optimizer.intra.solver.problem import Problem
from pipedream.optimizer.intra.solver.ties import equal_places, tie


def layered(seed: int, layers: int, limited: bool = False) -> Problem:
    """The same made-up layer again and again; each reads the last operator of the one before."""
    layer = made_up(seed, 4, limited=False)
    seconds, held, values, kinds = list(layer.seconds), list(layer.bytes), [], list(range(4))
    joint = layer.values[-1]
    for number in range(layers):
        first = 4 * number
        if number:
            seconds += layer.seconds
            held += layer.bytes
            kinds += range(4)
        values += [
            replace(v, source=v.source + first, readers=tuple(r + first for r in v.readers))
            for v in layer.values
        ]
        if number + 1 < layers:
            between = replace(
                joint,
                source=first + 3,
                given=np.arange(len(layer.seconds[3])) % len(joint.seconds),
                readers=(first + 4,),
                wanted=(np.arange(len(layer.seconds[0])) % joint.seconds.shape[1],),
                backward=(False,),
            )
            values.append(between)
    problem = Problem(seconds, held, values, kinds=kinds)
    if not limited:
        return problem
    rng = np.random.default_rng(seed)
    some = [problem.amounts(rng.integers(0, [len(s) for s in seconds])).bytes for _ in range(5)]
    return replace(problem, limit=float(min(some)))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7), st.integers(0, 2), st.booleans())
@example(6298, 6, 0, False)  # readers in both passes that all become the source
@example(290, 7, 0, False)  # values alike but for placements that no label has
def test_a_joined_problem_costs_what_the_labels_that_follow_do(seed, variables, rounds, limited):
    """Whatever is joined: operators that read themselves, and values read twice by one."""
    problem = replace(made_up(seed, variables, limited), kinds=[0] * variables)
    joined = tie(problem, rounds)
    count = max(joined.of) + 1
    sizes = [len(own) for own in joined.problem.seconds[:count]]
    limit = np.inf if problem.limit is None else problem.limit
    tied = (
        problem.amounts(joined.expanded(np.array(labels))) for labels in product(*map(range, sizes))
    )
    best = min((each.seconds for each in tied if each.bytes <= limit * (1 + 1e-12)), default=np.inf)
    choice = solve(joined.problem)
    assert choice.seconds == pytest.approx(best, rel=1e-9, abs=1e-15)
    assert choice.proven or best == np.inf
    assert best >= brute_force(problem) * (1 - 1e-12)
    if choice.labels is not None:
        own = problem.amounts(joined.expanded(choice.labels))
        assert own.seconds == pytest.approx(choice.seconds, rel=1e-9, abs=1e-15)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6))
def test_followers_may_have_other_labels_than_those_they_follow(seed, variables):
    problem, rng = made_up(seed, variables, limited=False), np.random.default_rng(seed)
    of = rng.integers(0, 2, variables)
    of = np.unique(of, return_inverse=True)[1]
    labels = [rng.integers(0, len(own), 3) for own in problem.seconds]
    joined = join(problem, of, labels)
    best = min(
        problem.amounts(joined.expanded(np.array(own))).seconds
        for own in product(range(3), repeat=max(of) + 1)
    )
    assert solve(joined.problem).seconds == pytest.approx(best, rel=1e-9, abs=1e-15)


@pytest.mark.thorough
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_free_layers_are_never_slower_than_tied_ones(seed, limited):
    """As an integer program has it, which for some of those with a limit would take many minutes:
    then what it takes at least is below, and what it has found not better.
    """
    problem = layered(seed, 20, limited)
    choice, reference = solve(problem), integer_program(problem, 10.0)
    assert choice.tied is not None
    assert choice.tied.seconds >= choice.seconds * (1 - 1e-9)
    best = np.inf if reference.labels is None else problem.amounts(reference.labels).seconds
    assert reference.bound * (1 - 1e-7) <= choice.seconds <= best * (1 + 1e-7)
    assert choice.bound <= best * (1 + 1e-9)


def test_inner_layers_are_in_equal_places_and_those_at_the_ends_are_not():
    places = equal_places(layered(3, 20), rounds=2).reshape(20, 4)
    assert (places[8] == places[11]).all()
    assert len(set(places[8])) == 4
    assert (places[0] != places[8]).any()
    assert (places[-1] != places[8]).any()


def test_without_kinds_nothing_is_tied():
    problem = replace(layered(5, 20), kinds=())
    assert max(equal_places(problem)) + 1 == 80
    assert solve(problem).tied is None


def test_messages_of_tied_layers_bound_the_free_ones_at_once():
    """With fewer sweeps than without them."""
    with_ties = without = 0
    for seed in range(12):
        problem = layered(seed, 30)
        with_ties += solve(problem).sweeps
        without += solve(replace(problem, kinds=())).sweeps
    assert with_ties < without
    assert exact._FEWER_SWEEPS < exact._SWEEPS

"""The best sharding of random operators, against HiGHS and, where they are few, all one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import inf, prod

import numpy as np
import pytest
from random_operators import random_graph

from pipedream.graph.cluster import Link
from pipedream.optimizer.intra.costs import Accounting, StageProblem
from pipedream.optimizer.intra.solver.exact import solve
from pipedream.optimizer.intra.solver.integer import integer_program
from pipedream.optimizer.intra.solver.problem import Problem
from pipedream.sharding.assignment import LinkedMesh

MESHES = ((2,), (3,), (4,), (2, 2), (2, 3))
FEW = 20_000
"""Choices that are looked at one by one."""


@pytest.mark.slow
@pytest.mark.one_in(100)
@pytest.mark.parametrize("seed", range(500))
def test_nothing_is_better(seed: int) -> None:
    chance = random.Random(seed)
    graph = random_graph(chance, most=12)
    mesh = chance.choice(MESHES)
    links = tuple(Link(bandwidth=10 ** chance.uniform(6, 11)) for _ in mesh)
    seconds = {call.name: 10 ** chance.uniform(-7, -3) for call in graph.calls}
    stage = StageProblem(
        *(graph, LinkedMesh(mesh, links), seconds, graph.backward_calls()),
        Accounting(chance.randint(1, 8), 10 ** chance.uniform(-12, -9)),
    )
    problem = stage.problem
    if chance.random() < 0.5:
        problem = replace(problem, limit=some_bytes(problem, chance))
    choice, reference = solve(problem), integer_program(problem)
    best = inf if reference.labels is None else problem.amounts(reference.labels).seconds
    assert choice.seconds == pytest.approx(best, rel=1e-7)
    assert choice.bound <= best * (1 + 1e-9)
    assert choice.proven or best == inf
    if prod(map(len, problem.seconds)) <= FEW:
        assert choice.seconds == pytest.approx(one_by_one(problem), rel=1e-9)


def some_bytes(problem: Problem, chance: random.Random) -> float:
    """The bytes of a choice at random, so that there is one."""
    labels = [chance.randrange(len(own)) for own in problem.seconds]
    return problem.amounts(np.array(labels)).bytes


def one_by_one(problem: Problem) -> float:
    limit = inf if problem.limit is None else problem.limit
    every = (
        problem.amounts(np.array(labels))
        for labels in product(*(range(len(own)) for own in problem.seconds))
    )
    return min((each.seconds for each in every if each.bytes <= limit), default=inf)

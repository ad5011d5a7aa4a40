"""Problems of made-up operators for the exact solver, and their best choice, one by one."""

from __future__ import annotations

from itertools import product

import numpy as np

from pipedream.optimizer.intra.solver.problem import Problem, Value


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


def ladder(seed: int, length: int = 100, labels: int = 4) -> Problem:
    """Two rows of variables, each with a value that the next one and the one opposite read. What
    labels cost by themselves is little beside what it costs to change them on the way.

        v0   -> v1   -> v2   -> ...
         |       |       |
        v100 -> v101 -> v102 -> ...
    """
    chance, every = np.random.default_rng(seed), np.arange(labels)
    alone = [0.1 * chance.random(labels) for _ in range(2 * length)]
    apart, nothing = 0.6 * np.abs(every[:, None] - every), np.zeros(labels)
    steps = [(v, v + 1) for v in range(2 * length - 1) if v != length - 1]
    ends = [*steps, *((v, v + length) for v in range(length))]
    values = [
        Value(v, every, (w,), (every,), apart, (False,), nothing, nothing, np.full(labels, -1))
        for v, w in ends
    ]
    return Problem(alone, [nothing] * len(alone), values)


def brute_force(problem: Problem) -> float:
    """The least seconds within the limit; infinite if nothing keeps it."""
    limit = np.inf if problem.limit is None else problem.limit
    choices = product(*(range(len(own)) for own in problem.seconds))
    amounts = (problem.amounts(labels) for labels in choices)
    return min((each.seconds for each in amounts if each.bytes <= limit), default=np.inf)

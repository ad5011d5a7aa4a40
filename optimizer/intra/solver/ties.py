"""Equal layers with equal strategies: a problem in which variables in equal places are one.

Two variables are in equal places if they stand for equal operators, and are joined by equal values
to variables that are in equal places as well, some steps around (the colours of Weisfeiler and
Leman, 1968). So the first and the last layers, which see the ends of a model, may differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

from pipedream.optimizer.intra.solver.joining import Joined, join
from pipedream.optimizer.intra.solver.problem import Ints, Problem, Value

ROUNDS = 6
"""Steps around a variable: enough to tell all operators of a layer of Llama or GPT-2 from each
other. With more, further layers at the ends of a model are on their own.
"""

_Hashes = NDArray[np.uint64]


def tie(problem: Problem, rounds: int = ROUNDS) -> Joined:
    """The problem with one label for all variables of a kind that are in equal places."""
    of = equal_places(problem, rounds)
    return join(problem, of, [np.arange(len(own)) for own in problem.seconds])


def equal_places(problem: Problem, rounds: int = ROUNDS) -> Ints:
    """A number for each variable, the same for those in equal places; in order of the first."""
    kinds = problem.kinds or range(len(problem.seconds))
    counts = (len(own) for own in problem.seconds)
    colours = _numbers(zip(kinds, counts, strict=True))
    ends = _numbers(end for value in problem.values for end in _ends(value))
    sizes = [1 + len(value.readers) for value in problem.values]
    member = np.array([v for e in problem.values for v in (e.source, *e.readers)], dtype=np.intp)
    value = np.repeat(np.arange(len(sizes)), sizes)
    for _ in range(rounds):
        of_value = np.zeros(len(sizes), dtype=np.uint64)
        np.add.at(of_value, value, _mixed(_mixed(colours)[member] + ends))
        around = np.zeros(len(colours), dtype=np.uint64)
        np.add.at(around, member, _mixed(_mixed(of_value)[value] + ends))
        colours = _mixed(_mixed(colours) + around)
    _, first, places = np.unique(colours, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[places], dtype=np.intp)


def _ends(value: Value) -> Iterable[Hashable]:
    """What each end of a value is: the same for the same ends of equal values."""
    kind = hash((value.seconds.shape, value.seconds.tobytes(), value.same.tobytes()))
    yield kind, value.given.tobytes()
    for wanted, when in zip(value.wanted, value.backward, strict=True):
        yield kind, wanted.tobytes(), when


def _numbers(things: Iterable[Hashable]) -> _Hashes:
    """A number for each, the same for equal ones."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(each, len(known)) for each in things], dtype=np.uint64)


def _mixed(numbers: _Hashes) -> _Hashes:
    """Sums of mixed numbers are equal if the numbers are (splitmix64; Steele et al., 2014)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))

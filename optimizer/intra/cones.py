"""Clusters of operators that are divided as their last one is (cones; EasyDist).

A root of a cone is a variable that several others read, or none; one that reads several others; and
one that makes less of what it reads, since that is where data are best moved. All others have the
labels that fit those of what reads them best, so that far fewer variables are left. What is lost is
what a cone's root does not know: where it would be cheaper to move something in the middle.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from pipedream.optimizer.intra.solver.joining import Joined, join
from pipedream.optimizer.intra.solver.problem import Problem, Value


def cones(problem: Problem) -> Joined:
    """The problem with one label for all variables of a cone. Variables are in an order in which
    what is read comes first; only a parameter reads what comes later, its gradient.
    """
    only = _only_readers(problem)
    labels = [np.arange(len(own)) for own in problem.seconds]
    root = list(range(len(labels)))
    # label(v) = argmin over l of seconds(v, l) + seconds to bring v from l to what its reader
    # wants; of equal ones one that gives it as wanted: parts can be had of the whole at no cost
    for variable in reversed(range(len(labels))):
        if variable in only:
            value = only[variable]
            (reader,), (wanted,) = value.readers, value.wanted
            given, needed = value.given[:, None], wanted[labels[reader]]
            total = problem.seconds[variable][:, None] + value.seconds[given, needed]
            root[variable] = root[reader]
            labels[variable] = np.lexsort((value.same[given] != needed, total), axis=0)[0]
    distinct = {own: number for number, own in enumerate(sorted(set(root)))}
    return join(problem, np.array([distinct[own] for own in root], dtype=np.intp), labels)


def _only_readers(problem: Problem) -> dict[int, Value]:
    """By variable that is no root: the value through which another one reads it."""
    given: dict[int, list[Value]] = defaultdict(list)
    read: dict[int, set[int]] = defaultdict(set)
    largest: dict[int, float] = defaultdict(float)
    for value in problem.values:
        later = [reader for reader in value.readers if reader > value.source]
        if later:
            given[value.source].append(value)
        for reader in later:
            read[reader].add(value.source)
            largest[reader] = max(largest[reader], _size(value))
    return {
        variable: own[0]
        for variable, own in given.items()
        if len(own) == len(own[0].readers) == 1
        and len(read[variable]) < 2
        and _size(own[0]) >= largest[variable]
    }


def _size(value: Value) -> float:
    """A measure of its bytes: the seconds of the longest way between placements."""
    return float(value.seconds.max(initial=0.0, where=np.isfinite(value.seconds)))

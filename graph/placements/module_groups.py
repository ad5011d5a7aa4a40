"""Consecutive nodes of one element of a list of modules: a block of a transformer, of a ResNet.

Models repeat such elements. Where equal ones are compiled once, that takes a part of the time
(torch calls it regional compilation); and a planner that keeps them whole has fewer places to cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import groupby


def module_groups(nodes: Sequence[str], paths: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Divides `nodes`, in the order of execution, into runs of nodes that follow each other.

    `paths`: the module of each node, as `Captured.module_paths`. What belongs to no element of a
    list goes together until the next element begins, under the name of the outermost module.
    """
    parts = [path.split(".") for path in paths.values()]
    whole = {own[: _depth(own)] for own in map(tuple, parts) if len(own) > 1}
    labels = ((_label(paths.get(name, ""), whole), name) for name in nodes)
    return [tuple(name for _, name in run) for _, run in groupby(labels, key=lambda each: each[0])]


def _depth(path: tuple[str, ...]) -> int:
    """Returns that of the outermost element of a list, if it has modules of its own; else that of
    the outermost module.
    """
    return next((k + 1 for k, part in enumerate(path[:-1]) if part.isdecimal()), 1)


def _label(path: str, whole: Set[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the longest beginning of the path that is kept whole; empty if none is."""
    parts = tuple(path.split("."))
    above = (parts[:count] for count in range(len(parts), 0, -1))
    return next((each for each in above if each in whole), ())

"""Divides a model into stretches of about equal time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from pipedream.graph.model import Graph

_REACH = 0.25
"""How far a cut may move to where fewer bytes cross, as a fraction of a stretch."""


def stretches(
    graph: Graph, nodes: Sequence[str], seconds: Mapping[str, float], count: int
) -> list[Sequence[str]]:
    """Divides `nodes`, in topological order, into at most `count` stretches of about equal time.

    Stretches are consecutive and not empty. Each cut is where the fewest bytes cross near the
    place that divides the time evenly.
    """
    reached = [0.0]
    for name in nodes:
        reached.append(reached[-1] + seconds.get(name, 0.0))
    crossing = _crossing(graph, nodes)
    places: list[int] = []
    for part in range(1, count):
        even = reached[-1] * part / count
        reach = reached[-1] / count * _REACH
        near = [p for p in range(1, len(nodes)) if abs(reached[p] - even) <= reach]
        nearest = min(range(1, len(nodes)), key=lambda p: abs(reached[p] - even), default=0)
        places.append(min(near, key=lambda p: crossing[p], default=nearest))
    bounds = sorted({0, *places, len(nodes)})
    return [nodes[start:end] for start, end in pairwise(bounds)]


def _crossing(graph: Graph, nodes: Sequence[str]) -> list[float]:
    """Bytes computed before and read after each place between two nodes, and both ends."""
    position = {name: index for index, name in enumerate(nodes)}
    change = [0.0] * (len(nodes) + 1)
    for name, index in position.items():
        readers = [position[reader] for reader in graph.successors[name] if reader in position]
        if readers:
            change[index + 1] += graph.nodes[name].output_bytes
            change[max(readers) + 1] -= graph.nodes[name].output_bytes
    return list(accumulate(change))

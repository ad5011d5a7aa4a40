"""Where to cut a model into stretches of about equal time, for a measurement of whole stretches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from pipedream.graph.model import Graph

_REACH = 0.25
"""How far from its place a cut may move, as a part of a stretch, to where few bytes cross."""


def stretches(
    graph: Graph, nodes: Sequence[str], seconds: Mapping[str, float], count: int
) -> list[Sequence[str]]:
    """`nodes` in at most `count` pieces, each of a `count`-th of their seconds, roughly.

    `nodes` in a topological order; the pieces follow each other in it, and none is empty. A cut is
    where the fewest bytes cross near the place where the time is divided evenly.
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
    """For each place between two nodes, and both ends, the bytes made before and read after."""
    position = {name: index for index, name in enumerate(nodes)}
    change = [0.0] * (len(nodes) + 1)
    for name, index in position.items():
        readers = [position[reader] for reader in graph.successors[name] if reader in position]
        if readers:
            change[index + 1] += graph.nodes[name].output_bytes
            change[max(readers) + 1] -= graph.nodes[name].output_bytes
    total, found = 0.0, []
    for step in change:
        total += step
        found.append(total)
    return found

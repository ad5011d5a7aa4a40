"""Where the downsets are too many to enumerate: a few thousand that are worth cutting at."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from pipedream.optimizer.antichain import bits, ready, ready_after
from pipedream.optimizer.planning import PlanningGraph


class Prefix(NamedTuple):
    """A downset, its compute time, and the output bytes that are still awaited."""

    downset: int
    seconds: float
    live_bytes: float


def prefixes(graph: PlanningGraph, limit: int) -> tuple[int, ...]:
    """Downsets (as AntichainDag's: the empty one first, the whole graph last), about `limit`.

    The prefixes of three topological orders (the file's, depth first, the one that keeps the fewest
    bytes alive), and as many of the lightest cuts of each size as there is room for. A plan over
    these is valid, but a better one may cut elsewhere. Where the prefixes alone are more than
    `limit`, the lightest is kept in each of as many equal shares of the compute time.
    """
    found = {prefix.downset: prefix for order in orders(graph) for prefix in _walk(graph, order)}
    downsets = {0, *found}
    if len(found) > limit:
        downsets = {0, (1 << len(graph)) - 1, *_lightest(found.values(), limit)}
    elif width := (limit - len(found)) // len(graph):
        downsets.update(_beam(graph, width))
    return tuple(sorted(downsets, key=lambda downset: (downset.bit_count(), downset)))


def orders(graph: PlanningGraph) -> list[list[int]]:
    """Topological orders: the file's, depth first, the one that keeps the fewest bytes alive."""
    return [list(range(len(graph))), _depth_first(graph), _fewest_bytes(graph)]


def _lightest(found: Collection[Prefix], limit: int) -> Iterator[int]:
    total = max(prefix.seconds for prefix in found)
    best: dict[int, Prefix] = {}
    for prefix in found:
        share = int(limit * prefix.seconds / total)
        if share not in best or prefix.live_bytes < best[share].live_bytes:
            best[share] = prefix
    return (prefix.downset for prefix in best.values())


def _beam(graph: PlanningGraph, width: int) -> Iterator[int]:
    """The `width` lightest cuts of each size that come of adding a node to those of the last."""
    generation = {0: (0.0, ready(graph, 0))}
    for _ in range(len(graph)):
        following: dict[int, tuple[float, int]] = {}
        for downset, (live, nodes) in generation.items():
            for node in bits(nodes):
                after = downset | 1 << node
                if after not in following:
                    grown = live + _growth(graph, downset, node)
                    following[after] = grown, ready_after(graph, downset, nodes, node)
        kept = heapq.nsmallest(width, following, key=lambda after: (following[after][0], after))
        generation = {downset: following[downset] for downset in kept}
        yield from generation


def _walk(graph: PlanningGraph, order: list[int]) -> Iterator[Prefix]:
    downset, seconds, live = 0, 0.0, 0.0
    for node in order:
        live += _growth(graph, downset, node)
        seconds += graph.compute_seconds[node]
        downset |= 1 << node
        yield Prefix(downset, seconds, live)


def _growth(graph: PlanningGraph, downset: int, node: int) -> float:
    """By how much the bytes still awaited grow when `node` joins the downset."""
    awaited = ~(downset | 1 << node)
    freed = sum(
        float(graph.output_bytes[producer])
        for producer in graph.producers[node]
        if not graph.consumer_masks[producer] & awaited
    )
    return (float(graph.output_bytes[node]) if graph.consumers[node] else 0.0) - freed


def _depth_first(graph: PlanningGraph) -> list[int]:
    """Always the node whose producers came last: a branch is finished before the next begins."""
    came: dict[int, int] = {}

    def age(downset: int, node: int) -> float:
        return -max((came[producer] for producer in graph.producers[node]), default=-1)

    for node in _greedy(graph, age):
        came[node] = len(came)
    return list(came)


def _fewest_bytes(graph: PlanningGraph) -> list[int]:
    """Always the node that adds least to the bytes still awaited, or takes most from them."""
    return list(_greedy(graph, lambda downset, node: _growth(graph, downset, node)))


def _greedy(graph: PlanningGraph, key: Callable[[int, int], float]) -> Iterator[int]:
    """The order that always takes the ready node of the smallest key; ties by number."""
    downset, nodes = 0, ready(graph, 0)
    while nodes:
        node = min(bits(nodes), key=lambda ready: key(downset, ready))
        yield node
        nodes = ready_after(graph, downset, nodes, node)
        downset |= 1 << node

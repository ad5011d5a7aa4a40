"""Where the downsets are too many to enumerate: the prefixes of a few topological orders."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from pipedream.optimizer.antichain import bits, ready, ready_after
from pipedream.optimizer.planning import PlanningGraph


class Prefix(NamedTuple):
    """The first nodes of an order: their downset, compute time, and output bytes still awaited."""

    downset: int
    seconds: float
    live_bytes: float


def prefixes(graph: PlanningGraph, limit: int) -> tuple[int, ...]:
    """Downsets (as AntichainDag's: the empty one first, the whole graph last), about `limit`.

    Three orders: the file's, depth first, and the one that keeps the fewest bytes alive. A plan
    over these is valid, but a better one may cut elsewhere. Where there are more than `limit`, the
    lightest cut is kept in each of as many equal shares of the compute time.
    """
    orders = (list(range(len(graph))), _depth_first(graph), _fewest_bytes(graph))
    found = {prefix.downset: prefix for order in orders for prefix in _walk(graph, order)}
    kept = list(found.values()) if len(found) <= limit else _lightest(found.values(), limit)
    ends = {0, (1 << len(graph)) - 1}
    downsets = {prefix.downset for prefix in kept} | ends
    return tuple(sorted(downsets, key=lambda downset: (downset.bit_count(), downset)))


def _lightest(found: Collection[Prefix], limit: int) -> list[Prefix]:
    total = max(prefix.seconds for prefix in found)
    best: dict[int, Prefix] = {}
    for prefix in found:
        share = int(limit * prefix.seconds / total)
        if share not in best or prefix.live_bytes < best[share].live_bytes:
            best[share] = prefix
    return list(best.values())


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

"""The antichain DAG: every way to cut a model in two (PipeDream, SOSP 2019, section 3.1).

A state is a *downset*: a set of nodes that contains the producers of each of its nodes, so the
first k stages can compute it. Its frontier, the nodes that no other of its nodes reads, is an
*antichain* and determines it. The *augmented* antichain adds the earlier nodes still to be read:
together they are all that crosses the cut. An edge of the DAG adds one node.

A topological order is one path through the DAG; the states on the path are its prefixes.

Sets of nodes are bits of an int, node 0 lowest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from pipedream.optimizer.cuts.planning_graph import PlanningGraph


def all_downsets(graph: PlanningGraph, limit: int) -> tuple[int, ...] | None:
    """All downsets by number of nodes: the empty one first, the whole graph last, and each before
    all that contain it. None if there are more than `limit`.

    Walks the DAG from the empty set, over all sources.
    """
    downsets: list[int] = []
    generation = {0: ready(graph, 0)}
    while generation:
        downsets += sorted(generation)
        if len(downsets) > limit:
            return None
        generation = {
            downset | 1 << node: ready_after(graph, downset, nodes, node)
            for downset, nodes in generation.items()
            for node in bits(nodes)
        }
    return tuple(downsets)


def bits(mask: int) -> Iterator[int]:
    """The positions of the ones, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def ready(graph: PlanningGraph, downset: int) -> int:
    """The nodes outside `downset` whose producers are all in it."""
    inside = (not inputs & ~downset for inputs in graph.producer_masks)
    return sum(1 << node for node, fits in enumerate(inside) if fits) & ~downset


def ready_after(graph: PlanningGraph, downset: int, nodes: int, node: int) -> int:
    """`ready` once `node` has joined `downset`, whose ready nodes were `nodes`."""
    outside = ~(downset | 1 << node)
    nodes ^= 1 << node
    for reader in graph.consumers[node]:
        if not graph.producer_masks[reader] & outside:
            nodes |= 1 << reader
    return nodes


def growth(graph: PlanningGraph, downset: int, node: int) -> float:
    """The growth of the bytes still to be read when `node` joins the downset."""
    awaited = ~(downset | 1 << node)
    freed = sum(
        float(graph.output_bytes[producer])
        for producer in graph.producers[node]
        if not graph.consumer_masks[producer] & awaited
    )
    return (float(graph.output_bytes[node]) if graph.consumers[node] else 0.0) - freed


@lru_cache(maxsize=8)
def depth_first(graph: PlanningGraph) -> tuple[int, ...]:
    """Always takes the node whose producers came last: finishes a branch before the next."""
    came: dict[int, int] = {}

    def age(downset: int, node: int) -> float:
        return -max((came[producer] for producer in graph.producers[node]), default=-1)

    for node in _greedy(graph, age):
        came[node] = len(came)
    return tuple(came)


@lru_cache(maxsize=8)
def fewest_bytes(graph: PlanningGraph) -> tuple[int, ...]:
    """Always takes the node that adds least to the bytes still to be read."""
    return tuple(_greedy(graph, lambda downset, node: growth(graph, downset, node)))


def _greedy(graph: PlanningGraph, key: Callable[[int, int], float]) -> Iterator[int]:
    """The order that always takes the ready node with the smallest key; ties by number."""
    downset, nodes = 0, ready(graph, 0)
    while nodes:
        node = min(bits(nodes), key=lambda ready: key(downset, ready))
        yield node
        nodes = ready_after(graph, downset, nodes, node)
        downset |= 1 << node

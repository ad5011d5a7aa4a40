"""Topological orders whose prefixes make good cuts, and what each node adds to a cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipedream.optimizer.cuts.antichains import bits, ready, ready_after
from pipedream.optimizer.cuts.planning_graph import PlanningGraph


def growth(graph: PlanningGraph, downset: int, node: int) -> float:
    """The growth of the bytes still to be read when `node` joins the downset."""
    awaited = ~(downset | 1 << node)
    freed = sum(
        float(graph.output_bytes[producer])
        for producer in graph.producers[node]
        if not graph.consumer_masks[producer] & awaited
    )
    return (float(graph.output_bytes[node]) if graph.consumers[node] else 0.0) - freed


def depth_first(graph: PlanningGraph) -> list[int]:
    """Always takes the node whose producers came last: finishes a branch before the next."""
    came: dict[int, int] = {}

    def age(downset: int, node: int) -> float:
        return -max((came[producer] for producer in graph.producers[node]), default=-1)

    for node in _greedy(graph, age):
        came[node] = len(came)
    return list(came)


def fewest_bytes(graph: PlanningGraph) -> list[int]:
    """Always takes the node that adds least to the bytes still to be read."""
    return list(_greedy(graph, lambda downset, node: growth(graph, downset, node)))


def _greedy(graph: PlanningGraph, key: Callable[[int, int], float]) -> Iterator[int]:
    """The order that always takes the ready node with the smallest key; ties by number."""
    downset, nodes = 0, ready(graph, 0)
    while nodes:
        node = min(bits(nodes), key=lambda ready: key(downset, ready))
        yield node
        nodes = ready_after(graph, downset, nodes, node)
        downset |= 1 << node

"""Topological orders of a graph that make good cuts, and what each node adds to a cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipedream.optimizer.cuts.antichains import bits, ready, ready_after
from pipedream.optimizer.cuts.planning_graph import PlanningGraph


def growth(graph: PlanningGraph, downset: int, node: int) -> float:
    """By how much the bytes still awaited grow when `node` joins the downset."""
    awaited = ~(downset | 1 << node)
    freed = sum(
        float(graph.output_bytes[producer])
        for producer in graph.producers[node]
        if not graph.consumer_masks[producer] & awaited
    )
    return (float(graph.output_bytes[node]) if graph.consumers[node] else 0.0) - freed


def depth_first(graph: PlanningGraph) -> list[int]:
    """Always the node whose producers came last: a branch is finished before the next begins."""
    came: dict[int, int] = {}

    def age(downset: int, node: int) -> float:
        return -max((came[producer] for producer in graph.producers[node]), default=-1)

    for node in _greedy(graph, age):
        came[node] = len(came)
    return list(came)


def fewest_bytes(graph: PlanningGraph) -> list[int]:
    """Always the node that adds least to the bytes still awaited, or takes most from them."""
    return list(_greedy(graph, lambda downset, node: growth(graph, downset, node)))


def _greedy(graph: PlanningGraph, key: Callable[[int, int], float]) -> Iterator[int]:
    """The order that always takes the ready node of the smallest key; ties by number."""
    downset, nodes = 0, ready(graph, 0)
    while nodes:
        node = min(bits(nodes), key=lambda ready: key(downset, ready))
        yield node
        nodes = ready_after(graph, downset, nodes, node)
        downset |= 1 << node

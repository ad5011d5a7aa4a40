"""All divisions of a small graph, by brute force."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from pipedream.optimizer.choose.division import Division, in_order
from pipedream.optimizer.cuts.antichains import all_downsets
from pipedream.optimizer.cuts.planning_graph import PlanningGraph


def every_division(graph: PlanningGraph, devices: int) -> Iterator[Division]:
    """Every chain of downsets, with every number of replicas of each stage that together are at
    most so many devices, all alike.
    """
    downsets = all_downsets(graph, 10**6)
    assert downsets is not None
    for chain in _chains(list(downsets)[1:], 0):
        stages = len(chain)
        for used in range(stages, devices + 1):
            for ends in combinations(range(1, used), stages - 1):
                counts = [b - a for a, b in zip((0, *ends), (*ends, used), strict=True)]
                yield Division(chain, in_order(counts))


def _chains(downsets: list[int], before: int) -> Iterator[tuple[int, ...]]:
    for downset in downsets:
        if downset != before and downset & before == before:
            if downset == downsets[-1]:
                yield (downset,)
            else:
                for rest in _chains(downsets, downset):
                    yield (downset, *rest)

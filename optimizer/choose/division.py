"""How a model is divided: nested downsets of its nodes, and the ranks of each stage between two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipedream.graph.cluster import Cluster
from pipedream.graph.plan import DraftPlan
from pipedream.optimizer.cost.stages import PlacedStage
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.planning_graph import PlanningGraph


class Division(NamedTuple):
    """`downsets[s]`: the nodes of stages 0 to s as bits, the last all of them; `ranks` of each
    stage; as many minibatches in flight as keep the pace if messages take longer than they should,
    by `slack` quarters. `meshes`: for each stage the number of the mesh that each of its ranks
    leads, where a search knows several; without, ranks are single devices.
    """

    downsets: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    slack: int = 0
    meshes: tuple[int, ...] = ()

    @staticmethod
    def of(plan: DraftPlan, graph: PlanningGraph) -> Division:
        """That of an existing plan for the graph."""
        downsets, before = [], 0
        for stage in plan.stages:
            for name in stage.nodes:
                if name in graph.position:
                    before |= 1 << graph.position[name]
            downsets.append(before)
        return Division(tuple(downsets), tuple(stage.ranks for stage in plan.stages))

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(map(len, self.ranks))

    def cuts(self, graph: PlanningGraph) -> Cuts:
        return Cuts(graph, (0, *self.downsets))

    def placed(self, cluster: Cluster) -> list[PlacedStage]:
        """Its stages between the cuts."""
        return [
            PlacedStage(stage, stage + 1, own, tuple(sorted(set(map(cluster.machine, own)))))
            for stage, own in enumerate(self.ranks)
        ]


def in_order(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """So many ranks for each stage, each on those next to the stage before it."""
    ranks, begin = [], 0
    for count in counts:
        ranks.append(tuple(range(begin, begin + count)))
        begin += count
    return tuple(ranks)


def even_downsets(graph: PlanningGraph, stages: int) -> tuple[int, ...]:
    """The downsets of stages of as much work each, in the order of the graph, none of them empty.
    There are at least so many nodes.
    """
    count, seconds = len(graph), np.cumsum(graph.compute_seconds)
    ends: list[int] = []
    for stage in range(1, stages + 1):
        end = int(np.searchsorted(seconds, seconds[-1] * stage / stages * (1 - 1e-12))) + 1
        least = (ends[-1] if ends else 0) + 1
        ends.append(min(max(end, least), count - (stages - stage)))
    ends[-1] = count
    return tuple((1 << end) - 1 for end in ends)

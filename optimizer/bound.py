"""A time that no plan beats, whatever it cuts: the certificate where the search is not exact."""

from __future__ import annotations

from math import prod
from operator import mul

import numpy as np

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost import CostModel, Work
from pipedream.optimizer.kinds import Kinds
from pipedream.optimizer.planning import Floats, PlanningGraph
from pipedream.optimizer.stage_cost import levels


def lower_bound(graph: PlanningGraph, cluster: Cluster, model: CostModel, straight: bool) -> float:
    """Seconds per minibatch: the larger of two bounds.

    All devices share the compute time at best by their speeds, since under every model a stage on
    d devices takes at least a d-th of what it takes on the slowest of them. And whatever stage
    holds a node takes at least as long as the node would alone, replicated as suits it best over
    devices of the fastest kind: more nodes, more to compute and reduce.
    """
    kinds = Kinds.of(cluster)
    speeds = [grade.speed for grade in kinds.each]
    together = prod(cluster.machines[:-1]) * sum(map(mul, speeds, kinds.counts))
    shared = float(graph.compute_seconds.sum() / together)
    alone: Floats = graph.compute_seconds / max(speeds)
    for level, count in zip(levels(cluster), cluster.machines, strict=True):
        work = Work(alone, graph.parameter_bytes, 0.0, np.zeros_like(alone))
        replicas = np.arange(1, 2 if straight else count + 1)[:, None]
        alone = model.seconds(model.terms(work, level, replicas, first=True)).min(axis=0)
    return max(shared, float(alone.max()))

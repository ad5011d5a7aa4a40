"""A time that no plan beats, whatever it cuts: the certificate where the search is not exact."""

from __future__ import annotations

from math import prod

import numpy as np

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost import CostModel, Work
from pipedream.optimizer.planning import PlanningGraph
from pipedream.optimizer.stage_cost import levels


def lower_bound(graph: PlanningGraph, cluster: Cluster, model: CostModel, straight: bool) -> float:
    """Seconds per minibatch: the larger of two bounds.

    All devices share the compute time at best equally, since under either model a stage on d
    devices takes at least a d-th of its own. And whatever stage holds a node takes at least as long
    as the node would alone, replicated as suits it best: more nodes, more to compute and reduce.
    """
    shared = float(graph.compute_seconds.sum()) / prod(cluster.machines)
    alone = graph.compute_seconds
    for level, count in zip(levels(cluster), cluster.machines, strict=True):
        work = Work(alone, graph.parameter_bytes, 0.0, np.zeros_like(alone))
        replicas = np.arange(1, 2 if straight else count + 1)[:, None]
        alone = model.seconds(model.terms(work, level, replicas, first=True)).min(axis=0)
    return max(shared, float(alone.max()))

"""From nested stages to ranks, and to the time of each once its levels are put together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost.stage_cost import Replication
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.hierarchical import NestedStage


def ranks(stage: NestedStage, cluster: Cluster) -> tuple[int, ...]:
    """The devices of a stage, the same in each component of every level it is replicated over.

    The outermost level counts fastest: minibatch b runs on the (b mod r)-th rank, so that stages
    which share a machine's inner pipeline keep each minibatch inside that machine, as the cost
    model takes for granted, whatever their replica counts.
    """
    places = (share.components for share in stage.shares)
    return tuple(cluster.rank(place) for place in product(*places))


def compute_seconds(graph: PlanningGraph, nodes: Sequence[int], recompute: bool) -> float:
    """Forward plus backward of these nodes on one worker; the forward pass twice to recompute."""
    inside = list(nodes)
    recomputed = graph.forward_seconds[inside].sum() if recompute else 0.0
    return float(graph.compute_seconds[inside].sum() + recomputed)


def _work_seconds(graph: PlanningGraph, nodes: Sequence[int], recompute: bool) -> float:
    """And what it takes to update them."""
    update = float(graph.parameter_bytes[list(nodes)].sum()) * graph.update
    return compute_seconds(graph, nodes, recompute) + update


def stage_time(cost: Replication, stage: NestedStage, recompute: bool = False) -> tuple[float, str]:
    """Seconds per minibatch that this stage allows, all levels together, and what sets them.

    `cost` is that on devices of the stage's grade.

    Costs of a level only grow with the cost inside, so the largest of these over the stages of a
    plan is the plan's time.
    """
    nodes = cost.cuts.nodes(stage.start, stage.end)
    work = _work_seconds(cost.cuts.graph, nodes, recompute)
    seconds = (work + cost.cuts.stage_overhead(stage.start)[[stage.end]]) / cost.speed
    limit = "compute"
    for share in stage.shares:
        end = slice(share.end, share.end + 1)
        replicas = np.array([share.replicas])
        terms = cost.terms(seconds, share.start, end, share.level, replicas, share.first)
        here = cost.model.limit(terms)
        limit = limit if here == "compute" else here
        seconds = cost.model.seconds(terms)
    return float(seconds[0]), limit


def data_parallel_time(cost: Replication, machines: Sequence[int]) -> float:
    """Seconds per minibatch with the whole model on every device; `cost` is on the slowest."""
    end = len(cost.cuts) - 1
    seconds = (cost.cuts.seconds[[end]] + cost.cuts.stage_overhead(0)[[end]]) / cost.speed
    for level, count in enumerate(machines, start=1):
        replicas = np.array([count])
        seconds = cost.replicated(seconds, 0, slice(end, end + 1), level, replicas, True)
    return float(seconds[0])

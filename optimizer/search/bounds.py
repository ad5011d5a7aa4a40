"""A time that no plan beats, whatever it cuts: the certificate where the search is not exact."""

from __future__ import annotations

from math import prod
from operator import mul

import numpy as np

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost.device_types import DeviceTypes
from pipedream.optimizer.cost.models import CostModel, Work
from pipedream.optimizer.cost.stage_cost import Priced, levels
from pipedream.optimizer.cuts.downsets import States
from pipedream.optimizer.cuts.frontier import Bins
from pipedream.optimizer.cuts.planning_graph import Floats, PlanningGraph
from pipedream.optimizer.search.hierarchical import Rules, Search


def lower_bound(graph: PlanningGraph, cluster: Cluster, model: CostModel, straight: bool) -> float:
    """Seconds per minibatch: the larger of two bounds.

    All devices share the compute time at best by their speeds, since under every model a stage on
    d devices takes at least a d-th of what it takes on the slowest of them. And whatever stage
    holds a node takes at least as long as the node would alone, replicated as suits it best over
    devices of the fastest kind: more nodes, more to compute and reduce.
    """
    device_types = DeviceTypes.of(cluster)
    speeds = [device.speed for device in device_types.worst]
    together = prod(cluster.machines[:-1]) * sum(map(mul, speeds, device_types.counts))
    shared = float(graph.compute_seconds.sum() / together)
    alone: Floats = graph.compute_seconds / max(speeds)
    for level, count in zip(levels(cluster), cluster.machines, strict=True):
        work = Work(alone, graph.parameter_bytes, 0.0, np.zeros_like(alone))
        replicas = np.arange(1, 2 if straight else count + 1)[:, None]
        alone = model.seconds(model.terms(work, level, replicas, first=True)).min(axis=0)
    return max(shared, float(alone.max()))


def bound_over_bins(
    bins: Bins, cluster: Cluster, model: CostModel, straight: bool, within: float
) -> float:
    """Seconds per minibatch that no plan beats; `within` where that is below what bins can show.

    Every plan cuts at downsets, each of some bin. Had each stage no more compute and parameters
    than lie between the bins of its two ends at least, and no more bytes to send than the least of
    each bin, the plan would cost no more; nor if it could leave machines unused, as it does where
    two of its cuts share a bin. The best of all such plans is a bound on every plan.
    """
    rules = Rules(straight, fewer_machines=True)
    cost = BinCost(bins, cluster, model)
    device_types = DeviceTypes.of(cluster).without_memory_limit
    best = Search(BinCuts(bins), cluster.machines, cost, rules, device_types, within).bottleneck()
    return min(best, within)


class BinCuts:
    """Bins as the states of a search."""

    def __init__(self, bins: Bins) -> None:
        self.bins = bins
        self.working = np.arange(len(bins), dtype=np.float64)

    def __len__(self) -> int:
        return len(self.bins)

    def after(self, start: int, end: int) -> States:
        rows = self.bins.row
        return np.flatnonzero(rows[start + 1 : end + 1] >= rows[start]) + start + 1


class BinCost(Priced):
    """The least that a stage between downsets of two bins can cost."""

    def __init__(self, bins: Bins, cluster: Cluster, model: CostModel) -> None:
        super().__init__(cluster, model, bins.bytes_across)
        self.bins = bins

    def on_device(self, start: int, ends: States, downstream_workers: int) -> Floats:
        least, most = self.bins.least_seconds[ends], self.bins.most_seconds[start]
        seconds: Floats = np.maximum(least - most, 0.0) / self.speed
        return seconds

    def parameter_bytes(self, start: int, ends: States) -> Floats:
        least, most = self.bins.least_parameters[ends], self.bins.most_parameters[start]
        parameters: Floats = np.maximum(least - most, 0.0)
        return parameters

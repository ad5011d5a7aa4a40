"""Lower bounds that no plan beats, wherever it cuts: the certificate of an inexact search.

For throughput, seconds per minibatch of any nested pipeline; for latency, seconds per batch of any
flat pipeline. Each is the larger of a closed form and of the best plan over bins of downsets
(cuts/frontier.py).
"""

from __future__ import annotations

from operator import mul

import numpy as np

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost.device_types import DeviceTypes
from pipedream.optimizer.cost.models import CostModel
from pipedream.optimizer.cost.stage_cost import LevelShare, Priced
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.cuts.downsets import States
from pipedream.optimizer.cuts.frontier import Bins
from pipedream.optimizer.cuts.planning_graph import Floats, PlanningGraph
from pipedream.optimizer.search.fill_order import Mesh, build_fill_order
from pipedream.optimizer.search.hierarchical import Search
from pipedream.optimizer.search.latency import DoneBounds, Latency, LatencySearch


def throughput_bound(
    graph: PlanningGraph, cluster: Cluster, model: CostModel, straight: bool
) -> float:
    """Seconds per minibatch of any plan: the larger of two bounds.

    All devices share the compute time at best in proportion to their speeds, since under every
    model a stage on d devices takes at least a d-th of its time on the slowest of them. And the
    stage that holds a node takes at least as long as the node would alone, with the best
    replication over devices of the fastest type: more nodes mean more to compute and reduce.
    """
    shared = float(graph.compute_seconds.sum() / _total_speed(cluster))
    cost = _PieceCost(cluster, model, graph.parameter_bytes)
    alone: Floats = graph.compute_seconds / DeviceTypes.of(cluster).fastest
    for level, count in enumerate(cluster.machines, start=1):
        replicas = np.arange(1, 2 if straight else count + 1)[:, None]
        alone = cost.price(alone, [LevelShare(level, 0, slice(None), replicas, True)]).min(axis=0)
    return max(shared, float(alone.max()))


def bound_over_bins(
    bins: Bins, cluster: Cluster, model: CostModel, straight: bool, within: float
) -> float:
    """Seconds per minibatch of any plan, at most `within`.

    Every plan cuts at downsets, each of some bin. If each stage had only the compute, parameters
    and bytes to send that its two bins imply at least, the plan would cost no more; nor if it could
    leave machines unused, as it does where two of its cuts share a bin. The best of all such plans
    is a bound on every plan.
    """
    rules = Rules(straight, fewer_machines=True)
    cost = _BinCost(bins, cluster, model)
    types = DeviceTypes.of(cluster).without_memory_limit
    search = Search(bins, cluster.machines, cost, rules, types, within)
    return min(search.bottleneck(), within)


def latency_bound(
    graph: PlanningGraph, cluster: Cluster, model: CostModel, straight: bool, microbatches: int
) -> float:
    """Seconds of a batch of B microbatches: B t for one stage, of time t, or more for several.

    Let a device of the slowest type do 1 per unit of time, all D devices P >= D, and let C be the
    total compute. S stages leave each other at least 1 each, and a stage takes at least its part of
    C over what its devices do. With t the slowest and x the sum of the others, C <= (P-S+1) t + x,
    so the time of the batch, B t + x, is least where x is 0 or t and S is 2. Besides, the stage
    that holds a node takes at least as long as the node alone on its best submesh; and each
    straight stage has one device.
    """
    seconds, types = graph.compute_seconds, DeviceTypes.of(cluster)
    nodes = _on_best_submesh(seconds, graph.parameter_bytes, cluster, model, straight)
    slowest = float(nodes.max())
    slowest_speed = min(device.speed for device in types.worst)
    total_speed = _total_speed(cluster) / slowest_speed
    work = float(seconds.sum()) / slowest_speed
    if straight:
        total = float(seconds.sum()) / types.fastest
        return total + (microbatches - 1) * max(slowest, work / total_speed)
    whole, parameters = np.array([seconds.sum()]), np.array([graph.parameter_bytes.sum()])
    alone = _on_best_submesh(whole, parameters, cluster, model, straight)
    one = microbatches * float(alone[0])
    if cluster.devices == 1:
        return one
    several = min(microbatches * work / (total_speed - 1), (microbatches + 1) * work / total_speed)
    return min(one, max(several, microbatches * slowest))


def latency_bound_over_bins(
    bins: Bins, cluster: Cluster, model: CostModel, rules: Rules, goal: Latency, within: float
) -> float:
    """Seconds of a batch of any flat pipeline, at most `within`.

    Every pipeline cuts at downsets, each of some bin. A stage costs no less than one with the least
    compute, parameters and bytes to send that its two bins allow, since no cost model decreases in
    any of these (cost/models.py). So the same pipeline over bins, where a stage may end in the bin
    it begins in, has no larger sum and no slower slowest stage; and the search does not exclude it,
    since up to a cut no more is computed than the devices so far can do.
    """
    types = DeviceTypes.of(cluster).without_memory_limit
    fill_order = build_fill_order(cluster.machines, types, rules, with_downstream=False)
    done = DoneBounds(bins.least_seconds, bins.most_seconds)
    cost = _BinCost(bins, cluster, model)
    search = LatencySearch(bins, done, fill_order, cost, goal, within, idle=True)
    solution = search.best()
    return within if solution is None else min(solution.bound, within)


def _total_speed(cluster: Cluster) -> float:
    """The relative speeds of all devices together."""
    types = DeviceTypes.of(cluster)
    inner = cluster.devices // cluster.machines[-1]
    speeds = (device.speed for device in types.worst)
    return float(inner * sum(map(mul, speeds, types.counts)))


def _on_best_submesh(
    seconds: Floats, parameters: Floats, cluster: Cluster, model: CostModel, straight: bool
) -> Floats:
    """The least seconds of each piece on any submesh, with nothing to receive.

    `seconds` as profiled. Of the submeshes of one size that on the fastest machines is the best.
    """
    mesh, best = Mesh(cluster.machines), np.full_like(seconds, np.inf)
    speeds = sorted((cluster.kind(m).speed for m in range(mesh.machines[-1])), reverse=True)
    cost = _PieceCost(cluster, model, parameters)
    for submesh in mesh.submeshes(0, straight):
        inner = seconds[None] / speeds[-(-submesh.size // mesh.within[-2]) - 1]
        shares = (
            LevelShare(level, 0, slice(None), np.array([[count]]), True)
            for level, count in enumerate(mesh.shape(submesh.size), start=1)
        )
        best = np.minimum(best, cost.price(inner, shares)[0])
    return best


class _PieceCost(Priced):
    """The cost of single pieces of the model, without boundaries; `ends` are their numbers."""

    def __init__(self, cluster: Cluster, model: CostModel, parameters: Floats) -> None:
        super().__init__(cluster, model, np.zeros_like(parameters))
        self.parameters = parameters

    def parameter_bytes(self, start: int, ends: States) -> Floats:
        return self.parameters[ends]


class _BinCost(Priced):
    """The least cost of a stage between downsets of two bins."""

    def __init__(self, bins: Bins, cluster: Cluster, model: CostModel) -> None:
        super().__init__(cluster, model, bins.bytes_across)
        self.bins = bins

    def on_device(
        self, start: int, ends: States, downstream_workers: int, replicas: int = 1
    ) -> Floats:
        least, most = self.bins.least_seconds[ends], self.bins.most_seconds[start]
        seconds: Floats = np.maximum(least - most, 0.0) / self.speed
        return seconds

    def parameter_bytes(self, start: int, ends: States) -> Floats:
        least, most = self.bins.least_parameters[ends], self.bins.most_parameters[start]
        parameters: Floats = np.maximum(least - most, 0.0)
        return parameters

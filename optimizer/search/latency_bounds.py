"""A batch time that no flat pipeline beats, whatever it cuts: for latency what bound.py is."""

from __future__ import annotations

from operator import mul

import numpy as np

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost.device_types import DeviceTypes
from pipedream.optimizer.cost.models import CostModel, Work
from pipedream.optimizer.cost.stage_cost import levels
from pipedream.optimizer.cuts.frontier import Bins
from pipedream.optimizer.cuts.planning_graph import Floats, PlanningGraph
from pipedream.optimizer.search.bounds import BinCost, BinCuts
from pipedream.optimizer.search.fill_order import build_fill_order
from pipedream.optimizer.search.hierarchical import Rules
from pipedream.optimizer.search.latency import Done, Latency, LatencySearch
from pipedream.optimizer.search.submeshes import Mesh


def latency_bound(
    graph: PlanningGraph, cluster: Cluster, model: CostModel, straight: bool, microbatches: int
) -> float:
    """Seconds of a batch of B microbatches: B t for one stage, of time t, or more for several.

    Let a device of the slowest kind do 1 in a unit of time, all D do P >= D, and C be what there is
    to compute. S stages leave each other at least 1 each, and a stage takes at least its part of C
    over what its devices do. With t the slowest and x what the others take together,
    C <= (P - S + 1) t + x, so that B t + x, the time of the batch, is least where x is 0 or t, and
    S is 2. Besides, the stage that holds a node takes at least as long as the node would alone on
    the submesh that suits it best; and each straight stage has one device.
    """
    mesh, device_types, seconds = (
        Mesh(cluster.machines),
        DeviceTypes.of(cluster),
        graph.compute_seconds,
    )
    nodes = _least(seconds, graph.parameter_bytes, cluster, model, straight)
    slowest = float(nodes.max())
    speeds = [device.speed for device in device_types.worst]
    least: float = min(speeds)
    capacity = float(mesh.within[-2] * sum(map(mul, speeds, device_types.counts)) / least)
    work = float(seconds.sum()) / least
    if straight:
        return float(seconds.sum()) / device_types.fastest + (microbatches - 1) * max(
            slowest, work / capacity
        )
    whole, parameters = np.array([seconds.sum()]), np.array([graph.parameter_bytes.sum()])
    one = microbatches * float(_least(whole, parameters, cluster, model, straight)[0])
    if mesh.devices == 1:
        return one
    several = min(microbatches * work / (capacity - 1), (microbatches + 1) * work / capacity)
    return min(one, max(several, microbatches * slowest))


def latency_bound_over_bins(
    bins: Bins, cluster: Cluster, model: CostModel, rules: Rules, goal: Latency, within: float
) -> float:
    """Seconds of a batch that no flat pipeline beats; `within` where that is below what bins show.

    Every pipeline cuts at downsets, each of some bin. A stage costs no less than one with the
    least compute, parameters and bytes to send that its two bins allow, since no cost model falls
    as any of these grows (cost.py). So the same pipeline over bins, where a stage may end in the
    bin in which it begins, has no larger sum and no slower slowest stage; nor does the search leave
    it out, since up to a cut no more is computed than the devices so far can do. The best over bins
    is a bound under any cost model.
    """
    device_types = DeviceTypes.of(cluster).without_memory_limit
    fill_order = build_fill_order(cluster.machines, device_types, rules, with_downstream=False)
    done = Done(bins.least_seconds, bins.most_seconds)
    cost = BinCost(bins, cluster, model)
    found = LatencySearch(BinCuts(bins), done, fill_order, cost, goal, within, idle=True).best()
    return within if found is None else min(found.bound, within)


def _least(
    seconds: Floats,
    parameters: Floats,
    cluster: Cluster,
    model: CostModel,
    straight: bool,
) -> Floats:
    """What each takes at least, on any submesh, with nothing to receive.

    `seconds` as profiled. Of the submeshes of a size the one on the fastest machines is the best.
    """
    mesh, best = Mesh(cluster.machines), np.full_like(seconds, np.inf)
    speeds = sorted((cluster.kind(m).speed for m in range(mesh.machines[-1])), reverse=True)
    for submesh in mesh.submeshes(0, straight):
        here = seconds[None] / speeds[-(-submesh.size // mesh.within[-2]) - 1]
        for replicas, level in zip(mesh.shape(submesh.size), levels(cluster), strict=True):
            work = Work(here, parameters, 0.0, np.zeros_like(seconds))
            count = np.array([[replicas]])
            here = model.seconds(model.terms(work, level, count, first=True))
        best = np.minimum(best, here[0])
    return best

"""A batch time that no flat pipeline beats, whatever it cuts: for latency what bound.py is."""

from __future__ import annotations

import numpy as np

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost import CostModel, Work
from pipedream.optimizer.kinds import Kinds
from pipedream.optimizer.planning import Floats, PlanningGraph
from pipedream.optimizer.stage_cost import levels
from pipedream.optimizer.submesh import Mesh


def latency_bound(
    graph: PlanningGraph, cluster: Cluster, model: CostModel, straight: bool, microbatches: int
) -> float:
    """Seconds of a batch of B microbatches: B t for one stage, of time t, or more for several.

    Several stages leave each other at most D - 1 of D devices, and a stage on d devices takes at
    least a d-th of its compute time C_i. With t the slowest and x what the others take together,
    C <= (D - S + 1) t + x for S stages, so that B t + x, the time of the batch, is least where x is
    0 or t, and S is 2. Besides, the stage that holds a node takes at least as long as the node
    would alone on the submesh that suits it best; and each straight stage has one device.
    """
    mesh = Mesh(cluster.machines)
    seconds = graph.compute_seconds / Kinds.of(cluster).fastest
    total, devices = float(seconds.sum()), mesh.devices
    nodes = _least(seconds, graph.parameter_bytes, cluster, model, straight)
    slowest = float(nodes.max())
    if straight:
        return total + (microbatches - 1) * max(slowest, total / devices)
    work, parameters = seconds.sum(), graph.parameter_bytes.sum()
    whole = _least(np.array([work]), np.array([parameters]), cluster, model, straight)
    one = microbatches * float(whole[0])
    if devices == 1:
        return one
    several = min(microbatches * total / (devices - 1), (microbatches + 1) * total / devices)
    return min(one, max(several, microbatches * slowest))


def _least(
    seconds: Floats,
    parameters: Floats,
    cluster: Cluster,
    model: CostModel,
    straight: bool,
) -> Floats:
    """What each takes at least, on any submesh, with nothing to receive."""
    mesh, best = Mesh(cluster.machines), np.full_like(seconds, np.inf)
    for submesh in mesh.submeshes(0, straight):
        here = seconds[None]
        for replicas, level in zip(mesh.shape(submesh.size), levels(cluster), strict=True):
            work = Work(here, parameters, 0.0, np.zeros_like(seconds))
            count = np.array([[replicas]])
            here = model.seconds(model.terms(work, level, count, first=True))
        best = np.minimum(best, here[0])
    return best

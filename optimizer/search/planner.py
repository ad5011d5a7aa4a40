"""Graph and cluster in, plan out: the entry point of planning."""

from __future__ import annotations

from pipedream.graph.errors import UserError
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.latency_plan import plan_latency
from pipedream.optimizer.search.outcome import Outcome
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.search.throughput_plan import plan_throughput


def optimize(request: Request, most_cuts: int | None = None) -> Outcome:
    """The best plan over all nested downsets, or over some of them, with a bound, if more than
    `most_cuts` may be part of it (default: what can be searched in about half a minute).

    Raises UserError if there is nothing to plan, or no plan fits the memory.
    """
    graph = request.planning
    _check(graph, request)
    if request.latency is not None:
        return plan_latency(graph, request, request.latency, most_cuts)
    return plan_throughput(graph, request, most_cuts)


def _check(graph: PlanningGraph, request: Request) -> None:
    if not graph.compute_seconds.sum() > 0:
        raise UserError("no node of the graph takes any time: measure the model with pd-profile")
    devices, rules = request.cluster.devices, request.rules
    if rules.straight and not rules.fewer_machines and devices > len(graph):
        raise UserError(
            f"--straight: {devices} devices but only {len(graph)} nodes, and each stage needs at"
            " least one; give fewer --machines, or add --fewer-machines"
        )

"""Plans for latency: picks the cuts to search and bounds the result (the search: latency.py)."""

from __future__ import annotations

from dataclasses import replace

from pipedream.optimizer.cost.stage_cost import Replication
from pipedream.optimizer.cuts.antichains import AntichainDag
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.frontier import Bins, bins_of
from pipedream.optimizer.cuts.layering import layer_cuts
from pipedream.optimizer.cuts.likely_cuts import likely_cuts, orders, prefixes
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.bounds import latency_bound, latency_bound_over_bins, lower_bound
from pipedream.optimizer.search.fill_order import build_fill_order
from pipedream.optimizer.search.latency import Latency, narrowed
from pipedream.optimizer.search.memory_fit import nothing_fits
from pipedream.optimizer.search.outcome import Outcome, make_outcome
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.search.stages import Solution

_FEW = 200
"""Cuts of the trial search that estimates how many cuts can be searched."""


def plan_latency(
    graph: PlanningGraph, request: Request, goal: Latency, most_cuts: int | None
) -> Outcome:
    """The best flat pipeline for latency, over all nested downsets or over those between layers.

    Raises UserError if no plan fits the memory.
    """
    model, types, machines = request.model, request.device_types, request.cluster.machines
    straight = request.rules.straight
    constrained = request.constrains_stages(types)
    fill_order = build_fill_order(machines, types, request.rules, with_downstream=constrained)

    def cost_of(cuts: Cuts) -> Replication:
        limit = request.limit(request.memory_model(cuts), types)
        return Replication(cuts, request.cluster, model, limit)

    limit = most_cuts
    if limit is None:
        trial = narrowed(Cuts(graph, prefixes(graph, _FEW)), fill_order, cost_of, goal)
        trial.best()
        limit = max(trial.affordable(), 4 * request.cluster.devices * straight)
    dag = AntichainDag.of(graph, limit) if goal.layers is None else None
    bins = None
    if dag is None:
        bins = bins_of(graph)
        cuts = Cuts(graph, _some_cuts(graph, bins, goal, limit))
    else:
        cuts = Cuts(graph, dag.downsets)
    memory = request.memory_model(cuts)
    solution = narrowed(cuts, fill_order, cost_of, goal).best()
    if solution is None:
        raise nothing_fits(memory, request)
    slowest = lower_bound(graph, request.cluster, model, straight)
    stages = Solution(solution.cost, solution.stages)
    outcome = make_outcome(memory, request, stages, slowest, exact=False)
    times = [figures.seconds for figures in outcome.figures]
    seconds = goal.seconds(sum(times), max(times))
    bound = solution.bound
    if bins is not None:
        simple = latency_bound(graph, request.cluster, model, straight, goal.microbatches)
        merged, precise = bins.merged(limit), replace(goal, epsilon=0.0)
        over_bins = latency_bound_over_bins(
            merged, request.cluster, model, request.rules, precise, seconds
        )
        bound = max(simple, over_bins)
    predicted = outcome.plan.predicted.model_copy(
        update={
            "objective": "latency",
            "microbatches": goal.microbatches,
            "latency_seconds": seconds,
            "latency_lower_bound_seconds": min(seconds, bound),
        }
    )
    plan = outcome.plan.model_copy(update={"predicted": predicted})
    return replace(outcome, plan=plan, exact=dag is not None and not goal.epsilon)


def _some_cuts(graph: PlanningGraph, bins: Bins, goal: Latency, limit: int) -> tuple[int, ...]:
    """The cuts between layers if these are asked for, else about `limit` likely ones."""
    if goal.layers is None:
        return likely_cuts(graph, bins, limit)
    return layer_cuts(graph, list(dict.fromkeys(map(tuple, orders(graph)))), goal.layers)

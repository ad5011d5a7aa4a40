"""Graph and cluster in, plan out: the entry point of planning.

Picks the cuts to search and bounds the result; the searches: hierarchical.py for throughput and
latency.py for latency. All cuts are searched where there are few enough. For throughput, else those
that cannot be part of a plan better than the best found so far are pruned (pruning.py). If too many
are left, likely ones are searched and the result is bounded (bounds.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

from pipedream.graph.errors import UserError
from pipedream.optimizer.cost.device_types import DeviceTypes
from pipedream.optimizer.cost.memory import MemoryModel
from pipedream.optimizer.cost.stage_cost import StageCost
from pipedream.optimizer.cost.stages import TIE, Solution
from pipedream.optimizer.cuts.antichains import all_downsets
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.frontier import Bins, bins_of
from pipedream.optimizer.cuts.layering import layer_downsets
from pipedream.optimizer.cuts.likely_cuts import (
    in_order,
    lightest_states,
    likely_downsets,
    orders,
    prefixes,
)
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.bounds import (
    bound_over_bins,
    latency_bound,
    latency_bound_over_bins,
    throughput_bound,
)
from pipedream.optimizer.search.fill_order import build_fill_order
from pipedream.optimizer.search.hierarchical import Search, affordable
from pipedream.optimizer.search.latency import Latency, narrowed
from pipedream.optimizer.search.nothing_fits import NothingFits, check_versions, fits
from pipedream.optimizer.search.outcome import Outcome, make_outcome
from pipedream.optimizer.search.pruning import PruningProblem, prune_cuts
from pipedream.optimizer.search.request import Request

# Cuts for a first plan; cuts and search steps when there are too many cuts to try them all.
_FEW, _MANY, _STEPS = 200, 3_000, 1e9

_FOR_EACH_CUT = 2e4
"""Steps of filling bins that are worth it where only so many cuts are asked for."""

_AT_ONCE = 2
"""Only this fraction of the affordable cuts is searched at once; pruning is worth the rest."""

# So many downsets, or so many divided by the number of nodes, are listed in about two seconds.
_MOST_LISTED, _LISTED = 300_000, 1e8

_WORDS = 3e9
"""Words of memory, at most, for knowing which cuts are nested."""


class _Best(NamedTuple):
    """The best plan so far, the cuts it is over, and whether it is the best over all cuts."""

    memory: MemoryModel
    solution: Solution
    proven: bool


def optimize(request: Request, most_cuts: int | None = None) -> Outcome:
    """The best plan over all nested downsets, or over some of them, with a bound, if more than
    `most_cuts` may be part of it (default: what can be searched in about half a minute).

    Raises UserError if there is nothing to plan, or no plan fits the memory.
    """
    check(request)
    if request.latency is not None:
        return plan_latency(request, request.latency, most_cuts)
    return plan_throughput(request, most_cuts)


def rough_plan(request: Request, most_cuts: int) -> Outcome:
    """The best plan over all cuts, or over prefixes of topological orders if there are more than
    `most_cuts`, without a bound: where `optimize` takes long, this takes a fraction of it.

    Raises UserError as `optimize` does.
    """
    if request.latency is not None:
        return optimize(request, most_cuts)
    check(request)
    cuts = _few_cuts(request.planning, most_cuts)
    allowed = request.allowed_cuts(cuts.downsets)
    memory = request.memory_model(cuts if len(allowed) == len(cuts) else allowed)
    solution = _solution(memory, request, coarse=True)
    return make_outcome(memory, request, solution, 0.0, exact=False)


@lru_cache(maxsize=2)
def _few_cuts(graph: PlanningGraph, most: int) -> Cuts:
    return Cuts(graph, all_downsets(graph, most) or prefixes(graph, most))


def check(request: Request) -> None:
    """Raises UserError if there is nothing to plan, or too little for straight stages."""
    graph, rules, devices = request.planning, request.rules, request.cluster.devices
    if not graph.compute_seconds.sum() > 0:
        raise UserError("no node of the graph takes any time: measure the model with pd-profile")
    layers = None if request.latency is None else request.latency.layers
    if layers is not None and layers < len(graph):
        parts, what = layers, "layers"
    else:
        parts, what = len(graph), "nodes"
    if rules.straight and not rules.fewer_machines and devices > parts:
        raise UserError(
            f"--straight: {devices} devices but only {parts} {what}, and each stage needs at"
            " least one; give fewer --machines, or add --fewer-machines"
        )


def plan_throughput(request: Request, most_cuts: int | None) -> Outcome:
    """The best plan over all nested downsets, or over some, with a bound.

    Raises UserError if no plan fits the memory.
    """
    graph, types = request.planning, request.device_types
    limit = most_cuts or min(
        affordable(request.cluster.machines, types, request.zero != "never"),
        int((_WORDS * 64 / len(graph)) ** 0.5),
    )
    listed = most_cuts or max(limit, int(min(_MOST_LISTED, _LISTED / len(graph))))
    downsets = all_downsets(graph, listed)
    cuts, best = None, None
    if downsets is not None:
        cuts = request.allowed_cuts(downsets)
        best = _among_all(cuts, request, limit)
        if best is not None and best.proven:
            return _best_of_all(cuts, request, best)
    bins = bins_of(graph) if most_cuts is None else bins_of(graph, most_cuts * _FOR_EACH_CUT)
    many = most_cuts or _many(graph, bins, request)
    likely = request.memory_model(request.allowed_cuts(likely_downsets(graph, bins, many)))
    solution = _solution(likely, request)
    if best is None or solution.cost < best.solution.cost * (1 - TIE):
        best = _Best(likely, solution, proven=False)
        if cuts is not None:
            best = _narrowed(cuts, request, limit // _AT_ONCE, best)
            if best.proven:
                return _best_of_all(cuts, request, best)
    memory, solution, _ = best
    check_versions(memory, request, solution)
    cluster, model, straight = request.cluster, request.cost_model, request.rules.straight
    simple = throughput_bound(graph, cluster, model, straight)
    over_bins = bound_over_bins(bins.merged(many), cluster, model, straight, solution.cost)
    return make_outcome(memory, request, solution, max(simple, over_bins), exact=False)


def _best_of_all(cuts: Cuts, request: Request, best: _Best) -> Outcome:
    """The best plan; with a bound where single nodes are recomputed, or activations moved to the
    host, since the search counts classes of nodes, and so more than the plan may take.
    """
    memory, solution, _ = best
    check_versions(memory, request, solution)
    outcome = make_outcome(memory, request, solution, solution.cost, exact=True)
    if any(stage.by_node for stage in outcome.plan.stages):
        bound = throughput_bound(
            cuts.graph, request.cluster, request.cost_model, request.rules.straight
        )
        outcome = replace(outcome.predicting(lower_bound_seconds=bound), exact=False)
    return replace(outcome, considered=len(cuts))


def _among_all(cuts: Cuts, request: Request, limit: int) -> _Best | None:
    """The best plan over all cuts, or the best found if more than `limit` must be searched; None if
    there is none yet.
    """
    few, best = limit // _AT_ONCE, None
    if len(cuts) > few:
        likely = {*prefixes(cuts.graph, 2 * _FEW)}
        likely |= {cuts.downsets[state] for state in lightest_states(cuts, _FEW)}
        memory = request.memory_model(request.allowed_cuts(in_order(likely)))
        solution = _solve(memory, request)
        if solution is not None:
            best = _narrowed(cuts, request, few, _Best(memory, solution, proven=False))
    if len(cuts) <= limit and not (best and best.proven):
        memory = request.memory_model(cuts)
        best = _Best(memory, _solution(memory, request), proven=True)
    return best


def _narrowed(cuts: Cuts, request: Request, enough: int, best: _Best) -> _Best:
    """The best plan over the cuts that can be part of a better one than the best so far.

    While more than `enough` are left, some of them are searched, as long as that helps.
    """
    problem = PruningProblem(request.cluster, request.cost_model, request.rules)
    while not best.proven:
        cost = best.solution.cost
        alive = prune_cuts(cuts, problem, cost)
        few = len(alive) <= enough
        chosen = [0, *alive, len(cuts) - 1]
        if not few:
            some = alive[:: 1 + 2 * len(alive) // max(enough, 1)]
            chosen = sorted({*lightest_states(cuts, _FEW, alive), *some.tolist()})
        memory = request.memory_model(cuts.subset(chosen))
        better = _solve(memory, request, cost * (1 - 2 * TIE))
        if better is None:
            return best._replace(proven=few)
        best = _Best(memory, better, proven=few)
    return best


def _many(graph: PlanningGraph, bins: Bins, request: Request) -> int:
    """How many cuts can be searched in some seconds, judging by a search over a few."""
    machines, types = request.cluster.machines, request.device_types.without_memory_limit
    cuts = Cuts(graph, likely_downsets(graph, bins, _FEW))
    cost = request.stage_cost(cuts)
    cheapest = Search(cuts, machines, cost, request.rules, types).bottleneck()
    limited = Search(cuts, machines, cost, request.rules, types, cheapest)
    limited.bottleneck()
    growth = (_STEPS / max(limited.steps, 1)) ** (1 / (2 if len(machines) == 1 else 3))
    return int(min(max(_FEW, _FEW * growth), _MANY if len(machines) == 1 else _MANY * 2 // 3))


def _solution(memory: MemoryModel, request: Request, coarse: bool = False) -> Solution:
    """The best plan within the memory. Raises UserError if there is none."""
    solution = _solve(memory, request, coarse=coarse)
    if solution is None:
        raise NothingFits(memory, request)
    return solution


def _solve(
    memory: MemoryModel, request: Request, within: float = inf, coarse: bool = False
) -> Solution | None:
    """The best plan within the memory; None if there is none or it costs more than `within`;
    `coarse` as in `Search`.

    Prefers, at equal cost, a plan whose every stage has work, even if it leaves machines unused.
    """
    cuts, types = memory.cuts, request.device_types.without_memory_limit
    solution = _search(memory, request, types, False, within, coarse)
    if solution is not None and not fits(memory, request, types, solution):
        types = request.device_types
        solution = _search(memory, request, types, False, within, coarse)
    if solution is None:
        return None
    if any(cuts.working[stage.start] == cuts.working[stage.end] for stage in solution.stages):
        for rules in (request.rules, replace(request.rules, fewer_machines=True)):
            changed = replace(request, rules=rules)
            working = _search(memory, changed, types, True, solution.cost, coarse)
            if not working or not fits(memory, request, types, working):
                continue
            if working.cost <= solution.cost * (1 + TIE):
                return working
    return solution


def _search(
    memory: MemoryModel,
    request: Request,
    types: DeviceTypes,
    working: bool,
    within: float,
    coarse: bool,
) -> Solution | None:
    """The best plan; None if there is none or it costs more than `within`.

    With many cuts, a plan over a few of them first limits what is explored.
    """
    limit = request.limit(memory, types)
    cuts, machines, rules = memory.cuts, request.cluster.machines, request.rules
    if len(cuts) > 3 * _FEW and limit is None:
        few = cuts.subset(lightest_states(cuts, _FEW))
        rough = request.stage_cost(few, working=working)
        within = min(within, Search(few, machines, rough, rules, types, within).bottleneck())
    cost = request.stage_cost(cuts, limit, working)
    return Search(cuts, machines, cost, rules, types, within, coarse).best()


def plan_latency(request: Request, goal: Latency, most_cuts: int | None) -> Outcome:
    """The best flat pipeline for latency, over all nested downsets or over those between layers.

    Raises UserError if no plan fits the memory.
    """
    graph, cluster, types = request.planning, request.cluster, request.device_types
    model, straight = request.cost_model, request.rules.straight
    constrained = request.constrains_stages(types)
    fill_order = build_fill_order(cluster.machines, types, request.rules, constrained)

    def cost_of(cuts: Cuts) -> StageCost:
        return request.stage_cost(cuts, request.limit(request.memory_model(cuts), types))

    limit = most_cuts
    if limit is None:
        trial = narrowed(Cuts(graph, prefixes(graph, _FEW)), fill_order, cost_of, goal)
        trial.best()
        limit = max(trial.affordable(), 4 * cluster.devices * straight)
    downsets = all_downsets(graph, limit) if goal.layers is None else None
    bins, searched = None, downsets
    if searched is None:
        bins = bins_of(graph)
        if goal.layers is None:
            searched = likely_downsets(graph, bins, limit)
        else:
            distinct = list(dict.fromkeys(map(tuple, orders(graph))))
            searched = layer_downsets(graph, distinct, goal.layers)
    memory = request.memory_model(request.allowed_cuts(searched))
    solution = narrowed(memory.cuts, fill_order, cost_of, goal).best()
    if solution is None:
        raise NothingFits(memory, request)
    slowest = throughput_bound(graph, cluster, model, straight)
    outcome = make_outcome(memory, request, solution, slowest, exact=False)
    seconds = outcome.batch_seconds(goal)
    bound = solution.bound
    rounded = any(stage.by_node for stage in outcome.plan.stages)
    if rounded:  # as in `_best_of_all`
        bound = latency_bound(graph, cluster, model, straight, goal.microbatches)
    elif bins is not None:
        simple = latency_bound(graph, cluster, model, straight, goal.microbatches)
        merged, precise = bins.merged(limit), replace(goal, epsilon=0.0)
        over_bins = latency_bound_over_bins(merged, cluster, model, request.rules, precise, seconds)
        bound = max(simple, over_bins)
    outcome = outcome.predicting(
        objective="latency",
        microbatches=goal.microbatches,
        latency_seconds=seconds,
        latency_lower_bound_seconds=min(seconds, bound),
    )
    return replace(outcome, exact=downsets is not None and not goal.epsilon and not rounded)

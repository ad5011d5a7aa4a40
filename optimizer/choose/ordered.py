"""Chooses cuts for an order of passes in which a rank may have several stages, by simulation.

For each way in which the stages can be on the ranks (how many on each, as a loop or a V, one
pipeline or several replicas of it) it begins with stages of as much work each, and moves cuts as
long as that makes the simulated round shorter: so it is the sums per rank that become even, and the
times of the passes between which the ranks wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipedream.graph.choices import BEST_ORDER, DEFAULT_ORDER
from pipedream.graph.cluster import Cluster
from pipedream.graph.errors import UserError
from pipedream.graph.plan import DraftPlan
from pipedream.graph.units import show_bytes
from pipedream.optimizer.choose.bound import lower_bound
from pipedream.optimizer.choose.division import Division, even_downsets
from pipedream.optimizer.choose.expected import expected
from pipedream.optimizer.choose.local_search import best_first
from pipedream.optimizer.choose.neighbours import Neighbours
from pipedream.optimizer.choose.ordered_trials import (
    AUTO,
    OrderedTrial,
    OrderedTrials,
    Shape,
    policy_of,
)
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.outcome import (
    Outcome,
    Rival,
    ScheduleTime,
    outcome_of,
    with_figures,
)
from pipedream.optimizer.search.request import Request
from pipedream.schedule.orders.literature import loop
from pipedream.schedule.orders.named import ROUND_ORDERS

_STEPS = 80
"""A search ends when it has tried more divisions of a shape."""

_WORTH_EXPLORING = 1.3
"""Shapes whose even division takes so many times as long as the best are left."""

_ORDERED = 4
"""Divisions for which an order is found."""

_NEAR = 1.1
"""Divisions in which a rank alone has so many times the best's work lead nowhere."""


def best_ordered_plan(request: Request) -> Outcome:
    """The fastest plan found in the order of the request. Raises UserError if there is none."""
    assert request.order not in (None, DEFAULT_ORDER)
    found, tried = _best_trials(request)
    found.sort(key=lambda each: each.simulated)
    fitting = [each for each in found if each.fits or request.split is not None]
    if not fitting:
        raise UserError(_nothing(request, found))
    outcome = _outcome(request, fitting[0], tried)
    return replace(
        outcome,
        rivals=tuple(_rivals(fitting[0], found)),
        schedules=tuple(_in_longer_rounds(request, fitting[0])),
        user_split=request.split is not None,
        notes=() if fitting[0].fits else (_too_large(fitting[0]),),
    )


def best_in_shape(request: Request, shape: Shape) -> Outcome:
    """The fastest plan found in the order of the request and one shape, beginning with stages of
    even time. Raises UserError if none fits.
    """
    trials = OrderedTrials(request, str(request.order), shape)
    first = trials.try_out(even(request.planning, shape))
    if first is None:
        raise UserError(_nothing(request, []))
    moved_cuts = Neighbours(request.planning, request.cluster, straight=True).moved_cuts
    best = best_first([first], trials, moved_cuts, _STEPS, _NEAR, unfit=True)
    if not best.fits:
        raise UserError(_nothing(request, [best]))
    return _outcome(request, best, trials.plans)


def _too_large(plan: OrderedTrial) -> str:
    return (
        f"Does not fit: a rank needs {show_bytes(plan.rank_bytes)}; give --memory more,"
        " --recompute always, or another --split."
    )


def _nothing(request: Request, found: Sequence[OrderedTrial]) -> str:
    if found:
        return (
            f"--order {request.order}: no plan found fits --memory: give --microbatches fewer,"
            " --recompute always, or v-min or v-half, which hold least"
        )
    if request.split is not None:
        counts = ",".join(map(str, request.split.replicas))
        return (
            f"--order {request.order}: no pipeline of this order has the stages of --split, with"
            f" {counts} workers, on {request.cluster.devices} devices: give each rank as many"
            " stages, and each stage as many replicas, or leave out --order"
        )
    each = "" if request.stages_each is None else f" of {request.stages_each} stages on each"
    return (
        f"--order {request.order}: there is no such pipeline{each} for"
        f" {request.cluster.devices} devices and {len(request.planning)} nodes, or it takes too"
        " long to simulate: give other devices, --stages-per-rank or --microbatches"
    )


def _best_trials(request: Request) -> tuple[list[OrderedTrial], int]:
    """The best division of each order and shape, of those shapes that begin well; with auto and
    best also the order found for it, if it is one of the best. And how many plans were made.
    """
    every = [name for name in ROUND_ORDERS if name != AUTO]
    wanted = every if request.order in (AUTO, BEST_ORDER) else [str(request.order)]
    trials = [
        OrderedTrials(request, order, shape) for order in wanted for shape in shapes(request, order)
    ]
    best = sorted(_best_of_each(request, trials), key=lambda each: each.rank)
    found = [] if request.order == AUTO else list(best)
    if request.order in (AUTO, BEST_ORDER):
        divided = {(each.shape, each.division): None for each in best}
        for shape, division in list(divided)[:_ORDERED]:
            trials.append(OrderedTrials(request, AUTO, shape))
            ordered = trials[-1].try_out(division)
            if ordered is not None:
                found.append(ordered)
    return found, sum(each.plans for each in trials)


def _best_of_each(request: Request, trials: Sequence[OrderedTrials]) -> Iterator[OrderedTrial]:
    """The best division of each, of those that begin well."""
    tried = ((each, each.try_out(_begin(request, each.shape))) for each in trials)
    begun = [(each, first) for each, first in tried if first is not None]
    begun.sort(key=lambda pair: pair[1].rank)
    moved_cuts = Neighbours(request.planning, request.cluster, straight=True).moved_cuts
    for own, first in begun:
        if first.simulated > begun[0][1].simulated * _WORTH_EXPLORING:
            continue
        if request.split is not None:
            yield first
        else:
            yield best_first([first], own, moved_cuts, _STEPS, _NEAR, unfit=True)


def _begin(request: Request, shape: Shape) -> Division:
    """The division of a shape to begin with: the user's, if there is one."""
    if request.split is None:
        return even(request.planning, shape)
    return Division(request.split.downsets(request.planning), shape.of_stages)


def shapes(request: Request, order: str) -> Iterator[Shape]:
    """Every way in which an order has the stages on the ranks of the cluster."""
    cluster, rules = request.cluster, ROUND_ORDERS[order]
    for stages_each in rules.stages_each:
        if request.stages_each not in (None, stages_each):
            continue
        if stages_each == 1 and order == "interleaved":  # which is 1f1b
            continue
        for replicas in range(1, cluster.devices + 1):
            count, left = divmod(cluster.devices, replicas)
            if left or count < 2 or count * stages_each > len(request.planning):
                continue
            if replicas > 1 and request.rules.straight:
                continue
            for rank_map in rules.maps or (loop,):
                places = rank_map(count, stages_each)
                for ranks in _layouts(cluster, count, replicas):
                    shape = Shape(places, ranks)
                    if request.split is None or request.split.replicas == shape.replicas:
                        yield shape


def _layouts(cluster: Cluster, places: int, replicas: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Replicas of a stage next to each other or, on several machines, those of a pipeline."""
    yield tuple(tuple(range(place * replicas, (place + 1) * replicas)) for place in range(places))
    if replicas > 1 and len(cluster.machines) > 1:
        yield tuple(
            tuple(place + places * replica for replica in range(replicas))
            for place in range(places)
        )


def even(graph: PlanningGraph, shape: Shape) -> Division:
    """Stages of as much work each."""
    return Division(even_downsets(graph, len(shape.places)), shape.of_stages)


def _outcome(request: Request, best: OrderedTrial, tried: int) -> Outcome:
    work = float(request.planning.compute_seconds.sum())
    plan = with_figures(
        best.plan,
        seconds_per_minibatch=best.simulated,
        lower_bound_seconds=min(lower_bound(request), best.simulated),
        one_worker_seconds=work / request.device_types.fastest,
    )
    memory = request.memory_model(best.division.cuts(request.planning))
    seconds = (stage.compute_seconds / stage.replicas for stage in plan.stages)
    times = list(zip(seconds, limits(plan, request), strict=True))
    in_flight = [stage.in_flight or 1 for stage in plan.stages]
    outcome = outcome_of(memory, request, plan, times, in_flight)
    outcome = replace(outcome, considered=tried, rank_bytes=best.rank_bytes)
    in_a_run = expected(plan, request)
    return outcome if in_a_run is None else in_a_run.noted_in(outcome)


def limits(plan: DraftPlan, request: Request) -> list[str]:
    """What limits each stage: compute, all-reduce or boundary, as for plans in the order 1F1B.

    It is boundary where messages use the port of a rank for longer than passes and sums of all its
    stages take. A rank may wait for others longer than that: the simulation says how long.
    """
    form = request.closed_form(plan, policy_of(plan))
    shares = [form.shares(stage, exposed) for stage, exposed in enumerate(form.exposed)]
    whole: dict[tuple[int, ...], float] = defaultdict(float)
    for ranks, own in zip(form.ranks, shares, strict=True):
        whole[tuple(ranks)] += sum(own)
    return [
        "boundary"
        if form.busiest_port(ranks) > whole[tuple(ranks)]
        else "all-reduce"
        if summed > compute
        else "compute"
        for ranks, (compute, summed) in zip(form.ranks, shares, strict=True)
    ]


def _rivals(best: OrderedTrial, found: Sequence[OrderedTrial]) -> Iterator[Rival]:
    """The best of each other order with as many stages on a rank."""
    named = {(each.order, each.shape.stages_each): each for each in reversed(found)}
    for (order, stages_each), each in sorted(named.items(), key=lambda pair: pair[1].simulated):
        if each is not best and each.division != best.division:
            name = f"{order}, {stages_each} on each rank" if stages_each > 1 else order
            yield Rival(name, each.division.replicas, each.fits, each.simulated, each.why)


def _in_longer_rounds(request: Request, best: OrderedTrial) -> Iterator[ScheduleTime]:
    """What the same stages take with more microbatches, between which a round's ends are shared."""
    for times in (2, 4):
        microbatches = times * request.settings.microbatches
        longer_rounds = replace(request, microbatches=microbatches)
        longer = OrderedTrials(longer_rounds, best.order, best.shape).try_out(best.division)
        if longer is not None and longer.fits:
            name = f"{request.schedule}, {best.order}"
            yield ScheduleTime(name, best.division.replicas, longer.seconds, microbatches)

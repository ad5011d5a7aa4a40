"""Graph and cluster in, plan out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from pipedream.graph.choices import MICROBATCHES, InFlight, OptimizerName, Recompute, ScheduleName
from pipedream.graph.cluster import Cluster
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan, PlannedGraph, Predicted, Stage
from pipedream.graph.profile import Footprint, TrainingOverheads
from pipedream.optimizer.cost.device_types import DeviceTypes
from pipedream.optimizer.cost.expected_time import in_a_run
from pipedream.optimizer.cost.memory import StageMemory, TrainingSettings
from pipedream.optimizer.cost.models import CostModel
from pipedream.optimizer.cost.rank_assignment import (
    compute_seconds,
    data_parallel_time,
    ranks,
    stage_time,
)
from pipedream.optimizer.cost.stage_cost import MemoryLimit, Replication
from pipedream.optimizer.cuts.antichains import AntichainDag
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.frontier import Bins, bins_of
from pipedream.optimizer.cuts.layering import layer_cuts
from pipedream.optimizer.cuts.likely_cuts import in_order, lightest, likely_cuts, orders, prefixes
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.cuts.pruning import PruningProblem, prune_cuts
from pipedream.optimizer.search.bounds import bound_over_bins, lower_bound
from pipedream.optimizer.search.fill_order import build_fill_order
from pipedream.optimizer.search.hierarchical import TIE, Rules, Search, Solution, affordable
from pipedream.optimizer.search.latency import Latency, narrowed
from pipedream.optimizer.search.latency_bounds import latency_bound, latency_bound_over_bins
from pipedream.optimizer.search.memory_fit import (
    WorkerMemory,
    fit,
    nothing_fits,
    too_many_versions,
    with_more_in_flight,
    worker_memory,
)
from pipedream.optimizer.search.required_in_flight import required_in_flight
from pipedream.optimizer.search.submeshes import Mesh, Submesh, nested_stage
from pipedream.optimizer.simulate.workload import UPDATE_RATE, Workload
from pipedream.schedule.policy import Peak, same_everywhere

# Cuts for a first plan, and for one where there are too many to try them all.
_FEW, _MANY, _STEPS = 200, 3_000, 1e9

# What is searched at once, as a part of what can be searched: for the rest time is well spent on
# finding out what need not be.
_AT_ONCE = 2

# So many downsets, and so many times nodes, can be listed in about two seconds.
_MOST_LISTED, _LISTED = 300_000, 1e8

# To know which of the cuts are nested takes this many words of memory, at most.
_WORDS = 3e9


@dataclass(frozen=True)
class Request:
    """What is to be planned. `memory`: bytes on each device, None for as much as it takes.

    `latency`: the batch that is to be through soonest; None to have the most minibatches through.
    `microbatches` make one update where the schedule makes one for several; None for the batch of
    `latency`, or else the default.
    `footprints` of the graph's nodes; without them they are taken to keep their outputs.
    `in_flight`: as few minibatches as fill the pipeline, or as many as keep its pace and have room;
    `update_rate` as in the simulator; `overheads`, where it was measured, as there.
    """

    graph: Graph
    cluster: Cluster
    model: CostModel
    schedule: ScheduleName = "weight-stashing"
    memory: float | None = None
    rules: Rules = field(default_factory=Rules)
    latency: Latency | None = None
    optimizer: OptimizerName = "sgd"
    recompute: Recompute = "auto"
    footprints: Mapping[str, Footprint] | None = None
    microbatches: int | None = None
    weight_prediction: bool = False
    in_flight: InFlight = "useful"
    update_rate: float = UPDATE_RATE
    overheads: TrainingOverheads | None = None

    @property
    def planning(self) -> PlanningGraph:
        """The graph, with what the cost model `measured` makes of overheads that were measured."""
        if self.overheads is None or self.model.name != "measured":
            return PlanningGraph.of(self.graph, self.footprints)
        settings = self.settings
        per_update = settings.microbatches if same_everywhere(settings.schedule) else 1
        return PlanningGraph.of(
            self.graph,
            self.footprints,
            update=1 / self.update_rate / per_update,
            call=self.overheads.call_forward + self.overheads.call_backward,
            reading=self.overheads.reading,
        )

    @property
    def spread(self) -> Sequence[float]:
        """How much passes vary, as multiples of their median, where the cost model looks at it."""
        if self.overheads is None or self.model.name != "measured":
            return ()
        return self.overheads.spread

    @property
    def settings(self) -> TrainingSettings:
        batch = self.latency and self.latency.microbatches
        microbatches = self.microbatches or batch or MICROBATCHES
        return TrainingSettings(self.schedule, self.optimizer, microbatches, self.weight_prediction)

    @property
    def device_types(self) -> DeviceTypes:
        """What the machines are, and the bytes that may be used of each device."""
        return DeviceTypes.of(self.cluster, self.memory)

    def limits(self, device_types: DeviceTypes) -> bool:
        """Whether memory or recomputation says anything about what a stage may be."""
        return device_types.memory_limited or self.recompute == "always"

    def limit(self, held: StageMemory, device_types: DeviceTypes) -> MemoryLimit | None:
        """What a stage may hold, where that or recomputation says anything about it."""
        if not self.limits(device_types):
            return None
        return MemoryLimit(device_types.smallest_memory, held, self.recompute)


@dataclass(frozen=True)
class StageFigures:
    """What the plan leaves out and a person wants to see, for one stage.

    `seconds` per minibatch over all replicas; `limit`: compute, all-reduce or boundary, whichever
    sets them.
    """

    seconds: float
    limit: str
    in_flight: int


@dataclass(frozen=True)
class Outcome:
    """A plan, figures for each of its stages, and over how many cuts it was sought.

    `exact`: they were all the cuts there are, so the plan is the best. `whole_model_bytes`: what
    one worker and data parallelism need on each device; `memory` what there is, None for no limit.
    `measured`: the memory is made of measured footprints.
    """

    plan: Plan
    figures: tuple[StageFigures, ...]
    cuts: int
    exact: bool
    whole_model_bytes: float
    memory: float | None
    measured: bool


def optimize(request: Request, most_cuts: int | None = None) -> Outcome:
    """The best plan over all nested downsets; or, where more than `most_cuts` of them (default:
    what can be searched in about half a minute) may be part of it, over some, with a bound.

    Raises UserError if there is nothing to plan, or no plan fits the memory.
    """
    graph = request.planning
    _check(graph, request)
    if request.latency is not None:
        return _optimize_latency(graph, request, request.latency, most_cuts)
    limit = most_cuts or min(
        affordable(
            request.cluster.machines,
            request.device_types.memory_limited,
            device_types=request.device_types,
        ),
        int((_WORDS * 64 / len(graph)) ** 0.5),
    )
    listed = most_cuts or max(limit, int(min(_MOST_LISTED, _LISTED / len(graph))))
    dag = AntichainDag.of(graph, listed)
    cuts, found = None, None
    if dag is not None:
        cuts = Cuts(graph, dag.downsets)
        found = _among_all(cuts, request, limit)
        if found is not None and found.best:
            return _best_of_all(cuts, request, found)
    bins = bins_of(graph)
    many = most_cuts or _many(graph, bins, request)
    likely = _memory_model(Cuts(graph, likely_cuts(graph, bins, many)), request)
    solution = _planned(likely, request)
    if found is None or solution.cost < found.solution.cost * (1 - TIE):
        found = _Found(likely, solution, best=False)
        if cuts is not None:
            found = _narrowed(cuts, request, limit // _AT_ONCE, found)
            if found.best:
                return _best_of_all(cuts, request, found)
    held, solution, _ = found
    _check_versions(held, request, solution)
    cluster, model, straight = request.cluster, request.model, request.rules.straight
    simple = lower_bound(graph, cluster, model, straight)
    over_bins = bound_over_bins(bins.merged(many), cluster, model, straight, solution.cost)
    return _outcome(held, request, solution, max(simple, over_bins), exact=False)


class _Found(NamedTuple):
    """A plan, the cuts it is over, and whether it is known to be the best over all cuts."""

    held: StageMemory
    solution: Solution
    best: bool


def _best_of_all(cuts: Cuts, request: Request, found: _Found) -> Outcome:
    held, solution, _ = found
    _check_versions(held, request, solution)
    return replace(_outcome(held, request, solution, solution.cost, exact=True), cuts=len(cuts))


def _check_versions(held: StageMemory, request: Request, solution: Solution) -> None:
    if not _fits(held, request, request.device_types, solution):
        raise too_many_versions(held, request, solution)


def _among_all(cuts: Cuts, request: Request, limit: int) -> _Found | None:
    """The best plan over all cuts there are, or the best found if more than `limit` need to be
    searched; None if that is none.
    """
    few, found = limit // _AT_ONCE, None
    if len(cuts) > few:
        likely = {*prefixes(cuts.graph, 2 * _FEW)}
        likely |= {cuts.downsets[index] for index in lightest(cuts, _FEW)}
        held = _memory_model(Cuts(cuts.graph, in_order(likely)), request)
        solution = _solve(held, request)
        if solution is not None:
            found = _narrowed(cuts, request, few, _Found(held, solution, best=False))
    if len(cuts) <= limit and not (found and found.best):
        held = _memory_model(cuts, request)
        found = _Found(held, _planned(held, request), best=True)
    return found


def _narrowed(cuts: Cuts, request: Request, enough: int, found: _Found) -> _Found:
    """The best plan over those cuts that can be part of a better one than the one found so far.

    Where more than `enough` can, it is sought over some of them as long as that helps.
    """
    question = PruningProblem(request.cluster, request.model, request.rules)
    while not found.best:
        cost = found.solution.cost
        alive = prune_cuts(cuts, question, cost)
        few = len(alive) <= enough
        chosen = [0, *alive, len(cuts) - 1]
        if not few:
            some = alive[:: 1 + 2 * len(alive) // max(enough, 1)]
            chosen = sorted({*lightest(cuts, _FEW, alive), *some.tolist()})
        held = _memory_model(Cuts(cuts.graph, [cuts.downsets[index] for index in chosen]), request)
        better = _solve(held, request, cost * (1 - 2 * TIE))
        if better is None:
            return found._replace(best=few)
        found = _Found(held, better, best=few)
    return found


def _many(graph: PlanningGraph, bins: Bins, request: Request) -> int:
    """How many cuts can be searched in some seconds, going by what a few of them take."""
    machines, device_types = request.cluster.machines, request.device_types.without_memory_limit
    cuts = Cuts(graph, likely_cuts(graph, bins, _FEW))
    cost = Replication(cuts, request.cluster, request.model)
    first = Search(cuts, machines, cost, request.rules, device_types).bottleneck()
    again = Search(cuts, machines, cost, request.rules, device_types, first)
    again.bottleneck()
    growth = (_STEPS / max(again.steps, 1)) ** (1 / (2 if len(machines) == 1 else 3))
    return int(min(max(_FEW, _FEW * growth), _MANY if len(machines) == 1 else _MANY * 2 // 3))


def _memory_model(cuts: Cuts, request: Request) -> StageMemory:
    return StageMemory(cuts, request.settings)


def _optimize_latency(
    graph: PlanningGraph, request: Request, goal: Latency, most_cuts: int | None
) -> Outcome:
    """The best flat pipeline for latency, over all nested downsets or over those between layers."""
    model, device_types, machines = request.model, request.device_types, request.cluster.machines
    straight = request.rules.straight
    fill_order = build_fill_order(
        machines, device_types, request.rules, with_downstream=request.limits(device_types)
    )

    def cost_of(cuts: Cuts) -> Replication:
        limit = request.limit(_memory_model(cuts, request), device_types)
        return Replication(cuts, request.cluster, model, limit)

    limit = most_cuts
    if limit is None:
        first = narrowed(Cuts(graph, prefixes(graph, _FEW)), fill_order, cost_of, goal)
        first.best()
        limit = max(first.affordable(), 4 * request.cluster.devices * straight)
    dag = AntichainDag.of(graph, limit) if goal.layers is None else None
    bins = None
    if dag is None:
        bins = bins_of(graph)
        held = _memory_model(Cuts(graph, _some_cuts(graph, bins, goal, limit)), request)
    else:
        held = _memory_model(Cuts(graph, dag.downsets), request)
    solution = narrowed(held.cuts, fill_order, cost_of, goal).best()
    if solution is None:
        raise nothing_fits(held, request)
    slowest = lower_bound(graph, request.cluster, model, straight)
    outcome = _outcome(held, request, Solution(solution.cost, solution.stages), slowest, False)
    times = [figures.seconds for figures in outcome.figures]
    seconds = goal.seconds(sum(times), max(times))
    bound = solution.bound
    if bins is not None:
        simple = latency_bound(graph, request.cluster, model, straight, goal.microbatches)
        merged = bins.merged(limit)
        over_bins = latency_bound_over_bins(
            merged, request.cluster, model, request.rules, replace(goal, epsilon=0.0), seconds
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
    """Those between the layers, where these are asked for."""
    if goal.layers is None:
        return likely_cuts(graph, bins, limit)
    return layer_cuts(graph, list(dict.fromkeys(map(tuple, orders(graph)))), goal.layers)


def _check(graph: PlanningGraph, request: Request) -> None:
    if not graph.compute_seconds.sum() > 0:
        raise UserError("no node of the graph takes any time: measure the model with pd-profile")
    devices, rules = request.cluster.devices, request.rules
    if rules.straight and not rules.fewer_machines and devices > len(graph):
        raise UserError(
            f"--straight: {devices} devices but only {len(graph)} nodes, one for each at least;"
            " give fewer --machines, or add --fewer-machines"
        )


def _planned(held: StageMemory, request: Request) -> Solution:
    """The best plan within the memory."""
    solution = _solve(held, request)
    if solution is None:
        raise nothing_fits(held, request)
    return solution


def _solve(held: StageMemory, request: Request, within: float = inf) -> Solution | None:
    """The best plan within the memory, None if there is none or it takes more than `within`.

    Where it is no slower, one whose every stage takes time, if need be on fewer machines: rather
    one without work than a stage without work.
    """
    cuts, device_types = held.cuts, request.device_types.without_memory_limit
    solution = _search(held, request, device_types, working=False, within=within)
    if solution is not None and not _fits(held, request, device_types, solution):
        device_types = request.device_types
        solution = _search(held, request, device_types, working=False, within=within)
    if solution is None:
        return None
    if any(cuts.working[stage.start] == cuts.working[stage.end] for stage in solution.stages):
        for rules in (request.rules, replace(request.rules, fewer_machines=True)):
            asked = replace(request, rules=rules)
            working = _search(held, asked, device_types, working=True, within=solution.cost)
            fits = working and _fits(held, request, device_types, working)
            if working and fits and working.cost <= solution.cost * (1 + TIE):
                return working
    return solution


def _search(
    held: StageMemory,
    request: Request,
    device_types: DeviceTypes,
    working: bool,
    within: float = inf,
) -> Solution | None:
    """The best plan, None if there is none or it costs more than `within`.

    Where the cuts are many, a plan over a few of them tells first what need not be looked into.
    """
    limit = request.limit(held, device_types)
    cuts, machines, rules = held.cuts, request.cluster.machines, request.rules
    if len(cuts) > 3 * _FEW and limit is None:
        few = Cuts(cuts.graph, [cuts.downsets[index] for index in lightest(cuts, _FEW)])
        rough = Replication(few, request.cluster, request.model, working=working)
        within = min(within, Search(few, machines, rough, rules, device_types, within).bottleneck())
    cost = Replication(cuts, request.cluster, request.model, limit, working)
    return Search(cuts, machines, cost, rules, device_types, within).best()


def _fits(
    held: StageMemory, request: Request, device_types: DeviceTypes, solution: Solution
) -> bool:
    """Whether what was found on devices of `device_types` fits on those that there are."""
    return fit(
        worker_memory(held, request.limit(held, device_types), solution, request.device_types)
    )


def _outcome(
    held: StageMemory, request: Request, solution: Solution, bound: float, exact: bool
) -> Outcome:
    cuts, device_types = held.cuts, request.device_types
    found: Sequence[WorkerMemory] = worker_memory(
        held, request.limit(held, device_types), solution, device_types
    )
    cost = Replication(cuts, request.cluster, request.model)
    times = [
        stage_time(cost.on(worker.device), stage, worker.recompute)
        for stage, worker in zip(solution.stages, found, strict=True)
    ]
    seconds = max(seconds for seconds, _ in times)
    predicted = Predicted(
        cost_model=request.model.name,
        microbatches=_microbatches(request, [stage.replicas for stage in solution.stages]),
        seconds_per_minibatch=seconds,
        expected_seconds_per_minibatch=in_a_run(
            times, [stage.replicas for stage in solution.stages], request.spread
        ),
        lower_bound_seconds=min(bound, seconds),
        one_worker_seconds=float(cuts.seconds[-1] + cuts.stage_overhead(0)[-1])
        / device_types.fastest,
        data_parallel_seconds=data_parallel_time(
            cost.on(device_types.worst_of(device_types.counts)), request.cluster.machines
        ),
    )
    plan = Plan(
        graph=PlannedGraph.of(request.graph),
        cluster=request.cluster,
        schedule=request.schedule,
        optimizer=request.optimizer,
        weight_prediction=request.weight_prediction or None,
        stages=_stages(cuts, request, solution, found),
        predicted=predicted,
    )
    if request.in_flight == "useful":
        found = with_more_in_flight(
            held, solution, device_types, found, _useful_in_flight(plan, request)
        )
        plan = plan.model_copy(update={"stages": _stages(cuts, request, solution, found)})
    whole = held.total(0, slice(len(cuts) - 1, None), Peak(1, 1), recompute=False)
    memory = device_types.smallest_memory if device_types.memory_limited else None
    figures = tuple(
        StageFigures(seconds, what, worker.peak.in_flight)
        for (seconds, what), worker in zip(times, found, strict=True)
    )
    return Outcome(
        plan, figures, len(cuts), exact, float(whole[0]), memory, bool(request.footprints)
    )


def _useful_in_flight(plan: Plan, request: Request) -> tuple[int, ...]:
    policy = request.settings.policy(plan.replicas)
    workload = Workload.of(plan, policy, request.graph, request.update_rate, request.overheads)
    return required_in_flight(plan, workload, policy)


def _microbatches(request: Request, replicas: Sequence[int]) -> int | None:
    """How many make one update, where the schedule makes one for several."""
    settings = request.settings
    policy = settings.policy(replicas)
    if not policy.same_everywhere:
        return None
    least = policy.least_microbatches
    if request.microbatches is not None and request.microbatches < least:
        raise UserError(
            f"--microbatches {request.microbatches}: with --schedule {request.schedule} the best"
            f" plan, of stages with {', '.join(map(str, replicas))} workers, has {least} in flight:"
            f" give at least --microbatches {least}"
        )
    return max(settings.microbatches, least)


def _stages(
    cuts: Cuts, request: Request, solution: Solution, found: Sequence[WorkerMemory]
) -> tuple[Stage, ...]:
    graph = cuts.graph
    nodes = [cuts.nodes(stage.start, stage.end) for stage in solution.stages]
    stage_of = graph.stage_of(nodes)
    return tuple(
        Stage(
            stage=position,
            nodes=tuple(name for name in request.graph.order if stage_of[name] == position),
            ranks=ranks(stage, request.cluster),
            compute_seconds=compute_seconds(graph, inside, worker.recompute) / worker.device.speed,
            parameter_bytes=float(graph.parameter_bytes[list(inside)].sum()),
            memory_bytes=worker.bytes,
            memory=worker.items,
            in_flight=worker.max_in_flight,
            recompute=worker.recompute,
        )
        for position, (stage, inside, worker) in enumerate(
            zip(solution.stages, nodes, found, strict=True)
        )
    )


def given_plan(
    request: Request, graph: PlanningGraph, ends: Sequence[int], sizes: Sequence[int]
) -> Outcome:
    """The plan whose stages are runs of `graph`'s nodes: nothing is sought, and no limit kept.

    Stage s ends before node `ends[s]`, on the next `sizes[s]` devices, a submesh of the cluster.
    """
    cuts = Cuts(graph, [(1 << end) - 1 for end in (0, *ends)])
    mesh = Mesh(request.cluster.machines)
    stages, begin = [], 0
    for stage, size in enumerate(sizes):
        submesh = Submesh(begin, size, mesh.boundary_level(begin))
        stages.append(nested_stage(mesh, stage, stage + 1, submesh))
        begin += size
    held = _memory_model(cuts, request)
    return _outcome(held, request, Solution(0.0, tuple(stages)), 0.0, exact=False)

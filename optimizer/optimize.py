"""Graph and cluster in, plan out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil

from pipedream.graph.cluster import Cluster
from pipedream.graph.command import UserError
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan, PlannedGraph, Predicted, ScheduleName, Stage
from pipedream.graph.units import show_bytes
from pipedream.optimizer.antichain import AntichainDag
from pipedream.optimizer.bound import lower_bound
from pipedream.optimizer.cluster_operators import layer_cuts
from pipedream.optimizer.cost import CostModel
from pipedream.optimizer.cuts import Cuts
from pipedream.optimizer.hierarchy import TIE, NestedStage, Rules, Search, Solution, affordable
from pipedream.optimizer.latency import Latency, LatencySearch, affordable_cuts
from pipedream.optimizer.latency_bound import latency_bound
from pipedream.optimizer.memory import stage_memory
from pipedream.optimizer.placement import data_parallel_time, ranks, stage_time
from pipedream.optimizer.planning import PlanningGraph
from pipedream.optimizer.prefixes import orders, prefixes
from pipedream.optimizer.stage_cost import LeastMemory, MemoryLimit, Replication
from pipedream.optimizer.submesh import Mesh
from pipedream.runtime.schedule import warm_up

# Cuts to choose from where there are too many to try them all: more take longer and gain little.
SAMPLE = 3_000

# Of so many microbatches all that matters is the slowest stage: here, the fullest.
FULLEST = 10**9


@dataclass(frozen=True)
class Request:
    """What is to be planned. `memory`: bytes on each device, None for as much as it takes.

    `latency`: the batch that is to be through soonest; None to have the most minibatches through.
    """

    graph: Graph
    cluster: Cluster
    model: CostModel
    schedule: ScheduleName = "weight-stashing"
    memory: float | None = None
    rules: Rules = field(default_factory=Rules)
    latency: Latency | None = None


@dataclass(frozen=True)
class StageFigures:
    """What the plan leaves out and a person wants to see, for one stage.

    `seconds` per minibatch over all replicas; `limit`: compute, all-reduce or boundary, whichever
    sets them. Bytes on one worker: weight versions and gradients, stashed activations.
    """

    seconds: float
    limit: str
    in_flight: int
    parameter_bytes: float
    stash_bytes: float


@dataclass(frozen=True)
class Outcome:
    """A plan, figures for each of its stages, and over how many cuts it was sought.

    `exact`: they were all the cuts there are, so the plan is the best. `whole_model_bytes`: what
    one worker and data parallelism need on each device; `memory` what there is, None for no limit.
    """

    plan: Plan
    figures: tuple[StageFigures, ...]
    cuts: int
    exact: bool
    whole_model_bytes: float
    memory: float | None


def optimize(request: Request, most_cuts: int | None = None) -> Outcome:
    """The best plan over all nested downsets, or over some where there are more than `most_cuts`
    (default: what can be searched in about half a minute).

    Raises UserError if there is nothing to plan, or no plan fits the memory.
    """
    graph = PlanningGraph.of(request.graph)
    _check(graph, request)
    if request.latency is not None:
        return _optimize_latency(graph, request, request.latency, most_cuts)
    limit = most_cuts or affordable(request.cluster.machines, request.memory is not None)
    dag = AntichainDag.of(graph, limit)
    cuts = Cuts(graph, prefixes(graph, min(limit, SAMPLE)) if dag is None else dag.downsets)
    solution = _solve(cuts, request)
    if dag is None:
        bound = lower_bound(graph, request.cluster, request.model, request.rules.straight)
    else:
        bound = solution.cost
    return _outcome(cuts, request, solution, bound, dag is not None)


def _optimize_latency(
    graph: PlanningGraph, request: Request, goal: Latency, most_cuts: int | None
) -> Outcome:
    """The best flat pipeline for latency, over all nested downsets or over those between layers."""
    limit = most_cuts or affordable_cuts(request.cluster.machines, request.memory is not None)
    dag = AntichainDag.of(graph, limit) if goal.layers is None else None
    cuts = Cuts(graph, _likely_cuts(graph, goal, limit) if dag is None else dag.downsets)
    model, straight = request.model, request.rules.straight
    bound = latency_bound(graph, request.cluster, model, straight, goal.microbatches)
    memory = request.memory and MemoryLimit(request.memory, request.schedule)
    cost = Replication(cuts, request.cluster, model, memory or None)
    solution = LatencySearch(cuts, Mesh(request.cluster.machines), cost, request.rules, goal).best()
    if solution is None:
        assert request.memory is not None
        raise _nothing_fits(cuts, request, request.memory)
    slowest = lower_bound(graph, request.cluster, model, straight)
    outcome = _outcome(cuts, request, Solution(solution.cost, solution.stages), slowest, False)
    times = [figures.seconds for figures in outcome.figures]
    seconds = goal.seconds(sum(times), max(times))
    predicted = outcome.plan.predicted.model_copy(
        update={
            "objective": "latency",
            "microbatches": goal.microbatches,
            "latency_seconds": seconds,
            "latency_lower_bound_seconds": min(
                seconds, bound if dag is None else max(bound, solution.bound)
            ),
        }
    )
    plan = outcome.plan.model_copy(update={"predicted": predicted})
    return replace(outcome, plan=plan, exact=dag is not None and not goal.epsilon)


def _likely_cuts(graph: PlanningGraph, goal: Latency, limit: int) -> tuple[int, ...]:
    """Where the operators are too many, or it is asked for, the cuts between layers of them."""
    ways = list(dict.fromkeys(map(tuple, orders(graph))))
    if goal.layers is None and len(ways) * len(graph) < limit:
        return prefixes(graph, limit)
    return layer_cuts(graph, ways, goal.layers or max(1, limit // len(ways)))


def _check(graph: PlanningGraph, request: Request) -> None:
    if not graph.compute_seconds.sum() > 0:
        raise UserError("no node of the graph takes any time: measure the model with pd-profile")
    if request.cluster.kinds:
        raise UserError("kinds: no plan takes kinds of device into account yet; leave them out")
    devices, rules = request.cluster.devices, request.rules
    if rules.straight and not rules.fewer_machines and devices > len(graph):
        raise UserError(
            f"--straight: {devices} devices but only {len(graph)} nodes, one for each at least;"
            " give fewer --machines, or add --fewer-machines"
        )


def _solve(cuts: Cuts, request: Request) -> Solution:
    """The best plan within the memory; where it is no slower, one whose every stage takes time."""
    memory = None
    solution = _search(cuts, request, memory=None, working=False)
    assert solution is not None
    if request.memory is not None and _fullest(cuts, request, solution)[1] > request.memory:
        memory = MemoryLimit(request.memory, request.schedule)
        solution = _search(cuts, request, memory, working=False)
        if solution is None:
            raise _nothing_fits(cuts, request, request.memory)
    if any(cuts.working[stage.start] == cuts.working[stage.end] for stage in solution.stages):
        working = _search(cuts, request, memory, working=True)
        fits = working and (
            request.memory is None or _fullest(cuts, request, working)[1] <= request.memory
        )
        if working and fits and working.cost <= solution.cost * (1 + TIE):
            return working
    return solution


def _search(
    cuts: Cuts, request: Request, memory: MemoryLimit | None, working: bool
) -> Solution | None:
    cost = Replication(cuts, request.cluster, request.model, memory, working)
    return Search(cuts, request.cluster.machines, cost, request.rules).best()


def _fullest(cuts: Cuts, request: Request, solution: Solution) -> tuple[int, float]:
    """The stage whose workers hold most, and how many bytes."""
    figures = _memory(cuts, request.schedule, solution)
    total = [parameters + stash for _, parameters, stash in figures]
    return max(enumerate(total), key=lambda pair: pair[1])


def _memory(
    cuts: Cuts, schedule: ScheduleName, solution: Solution
) -> list[tuple[int, float, float]]:
    """For each stage: minibatches in flight, bytes for weights and gradients, stashed bytes."""
    replicas = [stage.replicas for stage in solution.stages]
    figures = []
    for position, stage in enumerate(solution.stages):
        minibatches = warm_up(replicas, position)
        end = slice(stage.end, stage.end + 1)
        memory = stage_memory(cuts, schedule, stage.start, end, minibatches)
        figures.append((minibatches, float(memory.parameters[0]), float(memory.stash[0])))
    return figures


def _nothing_fits(cuts: Cuts, request: Request, memory: float) -> UserError:
    """Names the stage that is too large in the plan that comes closest, and what would help."""
    schedule = request.schedule
    closest = _least_memory(cuts, request, schedule)
    assert closest is not None
    position, needed = _fullest(cuts, request, closest)
    minibatches, parameters, stash = _memory(cuts, schedule, closest)[position]
    remedies = [f"give at least --memory {_round_up(needed)}", "more machines", "a smaller batch"]
    if schedule == "weight-stashing":
        flush = _least_memory(cuts, request, "flush")
        if flush is not None and flush.cost < 0.9 * needed:
            remedies.append(f"--schedule flush (at least {_round_up(flush.cost)})")
    return UserError(
        f"--memory {show_bytes(memory)}: no plan fits; the closest needs {show_bytes(needed)} in"
        f" stage {position} of {len(closest.stages)}"
        f" ({_describe(cuts, closest.stages[position])}): {show_bytes(parameters)} for weights and"
        f" gradients, {show_bytes(stash)} for the activations of"
        f" {minibatches} {'minibatch' if minibatches == 1 else 'minibatches'} in flight;"
        f" {', '.join(remedies[:-1])} or {remedies[-1]}"
    )


def _least_memory(cuts: Cuts, request: Request, schedule: ScheduleName) -> Solution | None:
    """The plan whose fullest worker holds least; its cost is in bytes."""
    machines, cost = request.cluster.machines, LeastMemory(cuts, schedule)
    if request.latency is None:
        return Search(cuts, machines, cost, request.rules).best()
    fullest = LatencySearch(cuts, Mesh(machines), cost, request.rules, Latency(FULLEST)).best()
    return fullest and Solution(fullest.cost / FULLEST, fullest.stages)


def _describe(cuts: Cuts, stage: NestedStage) -> str:
    names = [cuts.graph.names[node] for node in cuts.nodes(stage.start, stage.end)]
    return names[0] if len(names) == 1 else f"{len(names)} nodes, {names[0]} to {names[-1]}"


def _round_up(amount: float) -> str:
    """An amount that --memory takes and that is enough."""
    unit, factor = ("MB", 1e6) if amount >= 1e8 else ("kB", 1e3) if amount >= 1e5 else ("B", 1.0)
    return f"{ceil(amount / factor)}{unit}"


def _outcome(
    cuts: Cuts, request: Request, solution: Solution, bound: float, exact: bool
) -> Outcome:
    cost = Replication(cuts, request.cluster, request.model)
    times = [stage_time(cost, stage) for stage in solution.stages]
    memory = _memory(cuts, request.schedule, solution)
    figures = tuple(
        StageFigures(seconds, limit, minibatches, parameters, stash)
        for (seconds, limit), (minibatches, parameters, stash) in zip(times, memory, strict=True)
    )
    seconds = max(stage.seconds for stage in figures)
    predicted = Predicted(
        cost_model=request.model.name,
        seconds_per_minibatch=seconds,
        lower_bound_seconds=min(bound, seconds),
        one_worker_seconds=float(cuts.graph.compute_seconds.sum()),
        data_parallel_seconds=data_parallel_time(cost, request.cluster.machines),
    )
    plan = Plan(
        graph=PlannedGraph.of(request.graph),
        cluster=request.cluster,
        schedule=request.schedule,
        stages=_stages(cuts, request, solution, figures),
        predicted=predicted,
    )
    whole = stage_memory(cuts, request.schedule, 0, slice(len(cuts) - 1, None), 1)
    return Outcome(plan, figures, len(cuts), exact, float(whole.total[0]), request.memory)


def _stages(
    cuts: Cuts, request: Request, solution: Solution, figures: tuple[StageFigures, ...]
) -> tuple[Stage, ...]:
    graph = cuts.graph
    nodes = [cuts.nodes(stage.start, stage.end) for stage in solution.stages]
    stage_of = graph.stage_of(nodes)
    return tuple(
        Stage(
            stage=position,
            nodes=tuple(name for name in request.graph.order if stage_of[name] == position),
            ranks=ranks(stage, request.cluster),
            compute_seconds=float(graph.compute_seconds[list(inside)].sum()),
            parameter_bytes=float(graph.parameter_bytes[list(inside)].sum()),
            memory_bytes=held.parameter_bytes + held.stash_bytes,
        )
        for position, (stage, inside, held) in enumerate(
            zip(solution.stages, nodes, figures, strict=True)
        )
    )

"""The outcome of planning: turns the stages that a search found into a plan with its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan, PlannedGraph, Predicted, Stage
from pipedream.optimizer.cost.memory import MemoryModel
from pipedream.optimizer.cost.stage_cost import Replication
from pipedream.optimizer.cost.stage_time import (
    compute_seconds,
    data_parallel_time,
    in_a_run,
    ranks,
    stage_time,
)
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.latency import Latency
from pipedream.optimizer.search.memory_fit import WorkerMemory, with_more_in_flight, worker_memory
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.search.required_in_flight import required_in_flight
from pipedream.optimizer.search.stages import Solution
from pipedream.optimizer.search.submeshes import Mesh, Submesh, nested_stage
from pipedream.optimizer.simulate.workload import Workload
from pipedream.schedule.policy import Peak


@dataclass(frozen=True)
class StageFigures:
    """Figures of one stage for the report that the plan leaves out.

    `seconds` per minibatch over all replicas; `limit`: compute, all-reduce or boundary, whichever
    sets them; `in_flight`: minibatches per worker.
    """

    seconds: float
    limit: str
    in_flight: int


@dataclass(frozen=True)
class Outcome:
    """A plan, figures for each of its stages, and the number of cuts considered.

    `exact`: these are all cuts of the graph, so the plan is the best. `whole_model_bytes`: what one
    worker and data parallelism need on each device; `memory` what a device has, None for no limit.
    `measured`: the memory of the stages comes from measured footprints.
    """

    plan: Plan
    figures: tuple[StageFigures, ...]
    cuts: int
    exact: bool
    whole_model_bytes: float
    memory: float | None
    measured: bool

    def batch_seconds(self, goal: Latency) -> float:
        """Seconds of a batch, sum t_i + (B - 1) max t_j."""
        times = [figures.seconds for figures in self.figures]
        return goal.seconds(sum(times), max(times))

    def predicting(self, **figures: object) -> Outcome:
        """The outcome with these figures in the plan's `Predicted`."""
        predicted = self.plan.predicted.model_copy(update=figures)
        return replace(self, plan=self.plan.model_copy(update={"predicted": predicted}))


def make_outcome(
    memory: MemoryModel, request: Request, solution: Solution, bound: float, exact: bool
) -> Outcome:
    """The plan made of the solution's stages; `bound`: seconds per minibatch that no plan beats.

    Raises UserError if --microbatches is too small for the schedule.
    """
    cuts, types = memory.cuts, request.device_types
    limit = request.limit(memory, types)
    workers: Sequence[WorkerMemory] = worker_memory(memory, limit, solution, types)
    cost = Replication(cuts, request.cluster, request.model)
    times = [
        stage_time(cost.on(worker.device), stage, worker.recompute)
        for stage, worker in zip(solution.stages, workers, strict=True)
    ]
    replicas = [stage.replicas for stage in solution.stages]
    seconds = max(seconds for seconds, _ in times)
    predicted = Predicted(
        cost_model=request.model.name,
        microbatches=_microbatches(request, replicas),
        seconds_per_minibatch=seconds,
        expected_seconds_per_minibatch=in_a_run(times, replicas, request.spread),
        lower_bound_seconds=min(bound, seconds),
        one_worker_seconds=float(cuts.seconds[-1] + cuts.stage_overhead(0)[-1]) / types.fastest,
        data_parallel_seconds=data_parallel_time(
            cost.on(types.worst_of(types.counts)), request.cluster.machines
        ),
    )
    plan = Plan(
        graph=PlannedGraph.of(request.graph),
        cluster=request.cluster,
        schedule=request.schedule,
        optimizer=request.optimizer,
        weight_prediction=request.weight_prediction or None,
        stages=_stages(cuts, request, solution, workers),
        predicted=predicted,
    )
    if request.in_flight == "useful":
        useful = _useful_in_flight(plan, request)
        workers = with_more_in_flight(memory, solution, types, workers, useful)
        plan = plan.model_copy(update={"stages": _stages(cuts, request, solution, workers)})
    whole = memory.of(0, len(cuts) - 1, Peak(1, 1), recompute=False)
    figures = tuple(
        StageFigures(seconds, what, worker.peak.in_flight)
        for (seconds, what), worker in zip(times, workers, strict=True)
    )
    return Outcome(
        plan=plan,
        figures=figures,
        cuts=len(cuts),
        exact=exact,
        whole_model_bytes=whole.total,
        memory=types.smallest_memory if types.memory_limited else None,
        measured=bool(request.footprints),
    )


def _useful_in_flight(plan: Plan, request: Request) -> tuple[int, ...]:
    policy = request.settings.policy(plan.replicas)
    workload = Workload.of(plan, policy, request.graph, request.update_rate, request.overheads)
    return required_in_flight(plan, workload, policy)


def _microbatches(request: Request, replicas: Sequence[int]) -> int | None:
    """How many make one update, None for schedules that update after every minibatch."""
    settings = request.settings
    policy = settings.policy(replicas)
    if not policy.uniform_updates:
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
    cuts: Cuts, request: Request, solution: Solution, workers: Sequence[WorkerMemory]
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
            memory_bytes=worker.memory.total,
            memory=worker.memory,
            in_flight=worker.max_in_flight,
            recompute=worker.recompute,
        )
        for position, (stage, inside, worker) in enumerate(
            zip(solution.stages, nodes, workers, strict=True)
        )
    )


def given_plan(
    request: Request, graph: PlanningGraph, ends: Sequence[int], sizes: Sequence[int]
) -> Outcome:
    """The plan with these stages, which are runs of `graph`'s nodes; no limit is checked.

    Stage s ends before node `ends[s]`, on the next `sizes[s]` devices, a submesh of the cluster.
    """
    cuts = Cuts(graph, [(1 << end) - 1 for end in (0, *ends)])
    mesh = Mesh(request.cluster.machines)
    stages, begin = [], 0
    for stage, size in enumerate(sizes):
        submesh = Submesh(begin, size, mesh.boundary_level(begin))
        stages.append(nested_stage(mesh, stage, stage + 1, submesh))
        begin += size
    solution = Solution(0.0, tuple(stages))
    return make_outcome(request.memory_model(cuts), request, solution, 0.0, exact=False)

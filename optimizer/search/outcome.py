"""The outcome of planning: turns the stages that a search found into a plan with its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan, Predicted, Stage
from pipedream.optimizer.cost.device_types import DeviceTypes
from pipedream.optimizer.cost.memory import MemoryModel
from pipedream.optimizer.cost.stage_time import (
    compute_seconds,
    data_parallel_time,
    in_a_run,
    ranks,
    stage_time,
)
from pipedream.optimizer.cost.stages import PlacedStage, Solution
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.latency import Latency
from pipedream.optimizer.search.memory_fit import (
    WorkerMemory,
    unweighed,
    with_more_in_flight,
    worker_memory,
)
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.search.required_in_flight import required_in_flight
from pipedream.optimizer.search.submeshes import Mesh, Submesh, nested_stage
from pipedream.optimizer.simulate.closed_form import ClosedForm
from pipedream.optimizer.simulate.workload import Workload
from pipedream.schedule.in_flight import warm_up
from pipedream.schedule.policy import Peak, Policy


@dataclass(frozen=True)
class StageFigures:
    """Figures of one stage for the report that the plan leaves out.

    `seconds` per minibatch over all replicas; `limit`: compute, all-reduce or boundary, whichever
    sets them; `in_flight`: minibatches per worker.
    """

    seconds: float
    limit: str
    in_flight: int


class Rival(NamedTuple):
    """Another plan: where it comes from, its replicas, whether it fits, its simulated seconds per
    minibatch, and what limits it.
    """

    name: str
    replicas: tuple[int, ...]
    fits: bool
    seconds: float
    why: str


class ScheduleTime(NamedTuple):
    """The fastest plan found under a schedule, with the order of its passes: its replicas, its
    simulated seconds per minibatch, and the minibatches of an update, None for one that updates
    after every minibatch.
    """

    schedule: str
    replicas: tuple[int, ...]
    seconds: float
    microbatches: int | None


@dataclass(frozen=True)
class Outcome:
    """A plan, figures for each of its stages, and the number of cuts considered.

    `exact`: these are all cuts of the graph, so the plan is the best. `whole_model_bytes`: what one
    worker and data parallelism need on each device; `memory` what a device has, None for no limit.
    `measured`: the memory of the stages comes from measured footprints. `rivals`: the plans that
    were simulated and lost, the fastest first; `schedules`: what others would take. `rank_bytes`:
    the most that a rank holds of all its stages, where it has several; `notes`: further lines;
    `given`: the stages are the user's.
    """

    plan: Plan
    figures: tuple[StageFigures, ...]
    cuts: int
    exact: bool
    whole_model_bytes: float
    memory: float | None
    measured: bool
    rivals: tuple[Rival, ...] = ()
    schedules: tuple[ScheduleTime, ...] = ()
    rank_bytes: float | None = None
    notes: tuple[str, ...] = ()
    given: bool = False

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
    cluster = request.cluster
    placed = [
        PlacedStage(stage.start, stage.end, ranks(stage, cluster), tuple(stage.machines))
        for stage in solution.stages
    ]
    if request.cost_model.prices_plans:
        return placed_outcome(memory, request, placed, bound, exact)
    cuts, types = memory.cuts, request.device_types
    workers: Sequence[WorkerMemory]
    workers = worker_memory(memory, request.limit(memory, types), placed, types)
    cost = request.stage_cost(cuts)
    times = [
        stage_time(cost.on(worker.device), stage, worker.recompute)
        for stage, worker in zip(solution.stages, workers, strict=True)
    ]
    seconds = max(seconds for seconds, _ in times)
    replicas = [stage.replicas for stage in placed]
    predicted = Predicted(
        cost_model=request.model.name,
        microbatches=_microbatches(request, replicas),
        seconds_per_minibatch=seconds,
        expected_seconds_per_minibatch=in_a_run(times, replicas, request.spread),
        lower_bound_seconds=min(bound, seconds),
        one_worker_seconds=_one_worker(cuts, types),
        data_parallel_seconds=data_parallel_time(
            cost.on(types.worst_of(types.counts)), cluster.machines
        ),
    )
    plan = Plan(**dict(make_plan(cuts, request, placed, workers, predicted)))
    if request.in_flight == "useful":
        useful = required_in_flight(plan, *_work(plan, request))
        workers = with_more_in_flight(memory, placed, types, workers, useful)
        plan = plan.model_copy(update={"stages": _stages(cuts, request, placed, workers)})
    return _outcome(memory, request, plan, times, workers, exact)


def placed_outcome(
    memory: MemoryModel,
    request: Request,
    placed: Sequence[PlacedStage],
    bound: float = 0.0,
    exact: bool = False,
    slack: int = 0,
) -> Outcome:
    """As `make_outcome`, for stages on any devices, priced as a whole in closed form; see
    `placed_plan`.
    """
    cuts, types = memory.cuts, request.device_types
    plan, form, workers = placed_plan(memory, request, placed, slack)
    plan = Plan(**dict(plan))  # which checks it
    every = tuple(range(request.cluster.devices))
    machines = tuple(range(request.cluster.machines[-1]))
    whole = [PlacedStage(0, len(cuts) - 1, every, machines)]
    predicted = plan.predicted.model_copy(
        update={
            "lower_bound_seconds": min(bound, form.seconds),
            "one_worker_seconds": _one_worker(cuts, types),
            "data_parallel_seconds": placed_plan(memory, request, whole)[1].seconds,
        }
    )
    plan = plan.model_copy(update={"predicted": predicted})
    times = [(stage.seconds, stage.limit) for stage in form.stages]
    return _outcome(memory, request, plan, times, workers, exact)


def placed_plan(
    memory: MemoryModel, request: Request, placed: Sequence[PlacedStage], slack: int = 0
) -> tuple[Plan, ClosedForm, Sequence[WorkerMemory]]:
    """The plan with these stages, its closed form and the memory of its workers; no limit is
    checked, and only the seconds per minibatch are predicted.

    As many minibatches in flight, where they fit, as keep the pace if messages take longer than
    they should, by `slack` quarters. Raises UserError if --microbatches is too small for the
    schedule.
    """
    cuts, types = memory.cuts, request.device_types
    least: Sequence[WorkerMemory]
    least = worker_memory(memory, request.limit(memory, types), placed, types)

    def weigh(useful: Sequence[int]) -> Sequence[WorkerMemory]:
        return with_more_in_flight(memory, placed, types, least, useful)

    return _in_flight(cuts, request, placed, least, weigh, slack)


def unweighed_plan(
    cuts: Cuts, request: Request, placed: Sequence[PlacedStage], slack: int = 0, within: float = inf
) -> tuple[Plan, ClosedForm, Sequence[WorkerMemory]]:
    """The same where memory is no limit, without any figures of memory: several times as fast; and
    with as few in flight as can be if stages and ports alone take longer than `within`.
    """
    settings, types = request.settings, request.device_types
    replicas = [stage.replicas for stage in placed]
    fewest = [warm_up(replicas, position) for position in range(len(placed))]

    def weigh(useful: Sequence[int]) -> Sequence[WorkerMemory]:
        wanted = [max(both) for both in zip(useful, fewest, strict=True)]
        return unweighed(placed, settings, types, wanted)

    return _in_flight(cuts, request, placed, weigh(fewest), weigh, slack, within)


def _in_flight(
    cuts: Cuts,
    request: Request,
    placed: Sequence[PlacedStage],
    workers: Sequence[WorkerMemory],
    weigh: Callable[[Sequence[int]], Sequence[WorkerMemory]],
    slack: int,
    within: float = inf,
) -> tuple[Plan, ClosedForm, Sequence[WorkerMemory]]:
    """The plan with as many minibatches in flight as are of use; `weigh` says which of them fit."""
    predicted = nothing_yet(request, _microbatches(request, [stage.replicas for stage in placed]))
    plan = make_plan(cuts, request, placed, workers, predicted)
    form = _closed_form(plan, request)
    if request.in_flight == "useful" and form.bound <= within:
        workers = weigh(form.useful_in_flight(1 + slack / 4))
        plan = with_memory(plan, workers)
        form = form.under(request.settings.policy(plan.replicas, plan.max_in_flight))
    predicted = predicted.model_copy(update={"seconds_per_minibatch": form.seconds})
    return plan.model_copy(update={"predicted": predicted}), form, workers


def nothing_yet(request: Request, microbatches: int | None) -> Predicted:
    """No figures: those of a plan that is yet to be priced."""
    return Predicted(
        cost_model=request.model.name,
        microbatches=microbatches,
        seconds_per_minibatch=0.0,
        lower_bound_seconds=0.0,
        one_worker_seconds=0.0,
        data_parallel_seconds=0.0,
    )


def with_memory(plan: Plan, workers: Sequence[WorkerMemory]) -> Plan:
    """The plan with what the workers of each stage hold, and as many minibatches in flight."""
    stages = tuple(
        stage.model_copy(
            update={
                "in_flight": worker.max_in_flight,
                "memory": worker.memory,
                "memory_bytes": worker.memory.total,
            }
        )
        for stage, worker in zip(plan.stages, workers, strict=True)
    )
    return plan.model_copy(update={"stages": stages})


def _one_worker(cuts: Cuts, types: DeviceTypes) -> float:
    return float(cuts.seconds[-1] + cuts.stage_overhead(0)[-1]) / types.fastest


def _work(plan: Plan, request: Request) -> tuple[Workload, Policy]:
    policy = request.settings.policy(plan.replicas, plan.max_in_flight)
    return Workload.of(plan, policy, request.graph, request.update_rate, request.overheads), policy


def _closed_form(plan: Plan, request: Request) -> ClosedForm:
    workload, policy = _work(plan, request)
    return ClosedForm(workload, plan.cluster, [stage.ranks for stage in plan.stages], policy)


def make_plan(
    cuts: Cuts,
    request: Request,
    placed: Sequence[PlacedStage],
    workers: Sequence[WorkerMemory],
    predicted: Predicted,
) -> Plan:
    """Not checked: it is made for every division that is tried."""
    return Plan.model_construct(
        graph=request.planned_graph,
        cluster=request.cluster,
        schedule=request.schedule,
        optimizer=request.optimizer,
        weight_prediction=request.weight_prediction or None,
        stages=_stages(cuts, request, placed, workers),
        predicted=predicted,
    )


def _outcome(
    memory: MemoryModel,
    request: Request,
    plan: Plan,
    times: Sequence[tuple[float, str]],
    workers: Sequence[WorkerMemory],
    exact: bool,
) -> Outcome:
    cuts, types = memory.cuts, request.device_types
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
    cuts: Cuts, request: Request, placed: Sequence[PlacedStage], workers: Sequence[WorkerMemory]
) -> tuple[Stage, ...]:
    graph = cuts.graph
    nodes = [cuts.nodes(stage.start, stage.end) for stage in placed]
    stage_of = graph.stage_of(nodes)
    named: list[list[str]] = [[] for _ in placed]
    for name in request.graph.order:
        named[stage_of[name]].append(name)
    return tuple(
        Stage(
            stage=position,
            nodes=tuple(named[position]),
            ranks=stage.ranks,
            compute_seconds=compute_seconds(graph, inside, worker.recompute) / worker.device.speed,
            parameter_bytes=float(graph.parameter_bytes[list(inside)].sum()),
            memory_bytes=worker.memory.total,
            memory=worker.memory,
            in_flight=worker.max_in_flight,
            recompute=worker.recompute,
        )
        for position, (stage, inside, worker) in enumerate(zip(placed, nodes, workers, strict=True))
    )


def check_shared(
    request: Request, graph: PlanningGraph, ends: Sequence[int], sizes: Sequence[int]
) -> None:
    """Raises UserError if stages that end there share parameters that they cannot learn together,
    as pd-train would.
    """
    policy = request.settings.policy(sizes)
    for shared, (_, nodes) in zip(request.sharing, graph.shared, strict=True):
        stages = sorted({sum(end <= node for end in ends) for node in nodes})
        problem = policy.unshared(shared.parameter, stages, [[stage] for stage in range(len(ends))])
        if len(stages) > 1 and problem is not None:
            raise UserError(problem)


def given_plan(
    request: Request, graph: PlanningGraph, ends: Sequence[int], sizes: Sequence[int]
) -> Outcome:
    """The plan with these stages, which are runs of `graph`'s nodes; no limit of memory is checked.

    Stage s ends before node `ends[s]`, on the next `sizes[s]` devices, a submesh of the cluster.
    Raises UserError if stages share parameters that they cannot learn together.
    """
    check_shared(request, graph, ends, sizes)
    cuts = Cuts(graph, [(1 << end) - 1 for end in (0, *ends)])
    mesh = Mesh(request.cluster.machines)
    stages, begin = [], 0
    for stage, size in enumerate(sizes):
        submesh = Submesh(begin, size, mesh.boundary_level(begin))
        stages.append(nested_stage(mesh, stage, stage + 1, submesh))
        begin += size
    solution = Solution(0.0, tuple(stages))
    return make_outcome(request.memory_model(cuts), request, solution, 0.0, exact=False)

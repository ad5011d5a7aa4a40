"""The outcome of planning: turns the stages that a search found into a plan with its figures, and
as many minibatches in flight as keep the pace that it promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

from pipedream.graph.plan import DraftPlan, Plan, Predicted
from pipedream.optimizer.cost.device_types import DeviceTypes
from pipedream.optimizer.cost.memory import MemoryModel
from pipedream.optimizer.cost.network import Network
from pipedream.optimizer.cost.stage_time import data_parallel_time, in_a_run, ranks, stage_time
from pipedream.optimizer.cost.stages import PlacedStage, Solution
from pipedream.optimizer.cost.worker_memory import with_more_in_flight
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.search.fill_order import Mesh, Submesh, nested_stage
from pipedream.optimizer.search.latency import Latency
from pipedream.optimizer.search.placed_plan import (
    placed_plan,
    unpriced_plan,
    update_size,
    with_workers,
)
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.workload import StageWork, Workload
from pipedream.schedule.in_flight import StageTimes, useful_in_flight
from pipedream.schedule.policy import Peak, Policy

_LEEWAY = 1.05
"""Tolerated slowdown: between workers with equal work, a message of almost nothing would otherwise
cost every stage one more minibatch in flight."""

_MOST_PAIRS = 64
"""Pairs of replicas examined for each link."""


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

    @staticmethod
    def of(plan: Plan) -> ScheduleTime:
        """Of a plan that has been simulated."""
        said = plan.predicted
        assert said.simulated is not None
        name = f"{plan.schedule}, {plan.order}" if plan.order else plan.schedule
        seconds = said.simulated.seconds_per_minibatch
        return ScheduleTime(name, plan.replicas, seconds, said.microbatches)


@dataclass(frozen=True)
class Outcome:
    """A plan, and figures for each of its stages.

    - `considered`: how many cuts were searched or, for a plan chosen by simulation, how many plans
      were made; `exact`: these are all cuts of the graph, so the plan is the best;
    - `whole_model_bytes`: what one worker and data parallelism need on each device; `memory`: what
      a device has for it, None for no limit; `room`: what of a device is not the model's;
    - `measured`: the memory of the stages comes from measured footprints;
    - `rivals`: the plans that were simulated and lost, the fastest first; `schedules`: what others
      would take;
    - `rank_bytes`: the most that a rank holds of all its stages, where it has several;
    - `notes`: further lines; `user_split`: the stages are those of --split.
    """

    plan: Plan
    figures: tuple[StageFigures, ...]
    considered: int
    exact: bool
    whole_model_bytes: float
    memory: float | None
    measured: bool
    rivals: tuple[Rival, ...] = ()
    schedules: tuple[ScheduleTime, ...] = ()
    rank_bytes: float | None = None
    room: float = 0.0
    room_for: str = ""
    notes: tuple[str, ...] = ()
    user_split: bool = False

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
    workers = request.workers(memory, placed)
    cost = request.stage_cost(cuts)
    times = [
        stage_time(cost.on(worker.device), stage, worker.recompute)
        for stage, worker in zip(solution.stages, workers, strict=True)
    ]
    seconds = max(seconds for seconds, _ in times)
    varying = request.all_devices([stage.replicas for stage in placed])
    draft = unpriced_plan(cuts, request, placed, workers, update_size(request, placed))
    plan = with_figures(
        draft,
        seconds_per_minibatch=seconds,
        expected_seconds_per_minibatch=in_a_run(times, varying, request.spread_in_all),
        lower_bound_seconds=min(bound, seconds),
        one_worker_seconds=_one_worker(cuts, types),
        data_parallel_seconds=data_parallel_time(
            cost.on(types.worst_of(types.counts)), cluster.machines
        ),
    )
    if request.in_flight == "useful":
        policy = request.policy(plan)
        useful = required_in_flight(plan, request.workload(plan, policy), policy)
        workers = with_more_in_flight(memory, placed, types, workers, useful)
        plan = with_workers(plan, workers)
    in_flight = [worker.peak.in_flight for worker in workers]
    return outcome_of(memory, request, plan, times, in_flight, exact)


def required_in_flight(plan: DraftPlan, workload: Workload, policy: Policy) -> tuple[int, ...]:
    """The minibatches in flight of each stage.

    Assumes the times of `workload`, an idle network for every message and all-reduce, and a
    minibatch about as often as the cost model predicts or the workers can.
    """
    works = [
        work.at(min(plan.cluster.device(rank).speed for rank in stage.ranks))
        for work, stage in zip(workload.stages, plan.stages, strict=True)
    ]
    update = [_update(plan, policy, stage, work) for stage, work in enumerate(works)]
    busy = [
        (work.forward_seconds + work.backward_seconds + seconds) / replicas
        for work, seconds, replicas in zip(works, update, plan.replicas, strict=True)
    ]
    pace = StageTimes(
        period=_LEEWAY * max(plan.predicted.seconds_per_minibatch, *busy),
        forward=[work.forward_seconds for work in works],
        backward=[work.backward_seconds for work in works],
        update=update,
        there={link: _message(plan, link, sent) for link, sent in workload.forward_bytes.items()},
        back={link: _message(plan, link, sent) for link, sent in workload.backward_bytes.items()},
    )
    return useful_in_flight(plan.replicas, pace, list(workload.forward_bytes), policy.synchronized)


def _update(plan: DraftPlan, policy: Policy, stage: int, work: StageWork) -> float:
    """Seconds of all-reduce and update per minibatch of a worker."""
    ranks = plan.stages[stage].ranks
    reducing = Network(plan.cluster).all_reduce(ranks, work.parameter_bytes).total
    return (reducing + work.update_seconds) * len(ranks) / policy.round_size(stage)


def _message(plan: DraftPlan, link: tuple[int, int], amount: float) -> float:
    """Seconds of the slowest message of `amount` bytes on the link."""
    sources, targets = (plan.stages[stage].ranks for stage in link)
    count = min(lcm(len(sources), len(targets)), _MOST_PAIRS)
    pairs = {(sources[b % len(sources)], targets[b % len(targets)]) for b in range(count)}
    return max(Network(plan.cluster).message(*pair, amount).total for pair in pairs)


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
    cuts, cluster = memory.cuts, request.cluster
    plan, form, workers = placed_plan(cuts, request, placed, memory, slack)
    machines = tuple(range(cluster.machines[-1]))
    whole = [PlacedStage(0, len(cuts) - 1, tuple(range(cluster.devices)), machines)]
    plan = with_figures(
        plan,
        lower_bound_seconds=min(bound, form.seconds),
        one_worker_seconds=_one_worker(cuts, request.device_types),
        data_parallel_seconds=placed_plan(cuts, request, whole, memory).form.seconds,
    )
    in_flight = [worker.peak.in_flight for worker in workers]
    return outcome_of(memory, request, plan, form.stages, in_flight, exact)


def fixed_outcome(request: Request, ends: Sequence[int], replicas: Sequence[int]) -> Outcome:
    """The plan with these stages, which are runs of the planning graph's nodes; no limit of memory
    is checked.

    Stage s ends before node `ends[s]`, on the next `replicas[s]` devices, a submesh of the cluster.
    Raises UserError if stages share parameters that they cannot learn together.
    """
    request.check_shared(ends, replicas)
    cuts = Cuts(request.planning, [(1 << end) - 1 for end in (0, *ends)])
    mesh = Mesh(request.cluster.machines)
    stages, begin = [], 0
    for stage, size in enumerate(replicas):
        submesh = Submesh(begin, size, mesh.boundary_level(begin))
        stages.append(nested_stage(mesh, stage, stage + 1, submesh))
        begin += size
    solution = Solution(0.0, tuple(stages))
    return make_outcome(request.memory_model(cuts), request, solution, 0.0, exact=False)


def with_figures(plan: DraftPlan, **figures: float | None) -> Plan:
    """The plan with these figures, checked."""
    predicted = dict(plan.predicted) | figures
    return Plan(**dict(plan) | {"predicted": Predicted(**predicted)})


def _one_worker(cuts: Cuts, types: DeviceTypes) -> float:
    return float(cuts.seconds[-1] + cuts.stage_overhead(0)[-1]) / types.fastest


def outcome_of(
    memory: MemoryModel,
    request: Request,
    plan: Plan,
    times: Sequence[tuple[float, str]],
    in_flight: Sequence[int],
    exact: bool = False,
) -> Outcome:
    """The outcome with this plan; `times`, `in_flight`: of its stages, as in `StageFigures`."""
    cuts, types = memory.cuts, request.device_types
    whole = memory.of(0, len(cuts) - 1, Peak(1, 1), recompute=False)
    pairs = zip(times, in_flight, strict=True)
    figures = tuple(StageFigures(seconds, limit, count) for (seconds, limit), count in pairs)
    return Outcome(
        plan=plan,
        figures=figures,
        considered=len(cuts),
        exact=exact,
        whole_model_bytes=whole.total,
        memory=types.smallest_memory if types.memory_limited else None,
        measured=bool(request.footprints),
        room=request.room,
        room_for=request.room_for,
    )

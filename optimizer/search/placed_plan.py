"""Plans of stages on given devices, priced as a whole in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from pipedream.graph.errors import UserError
from pipedream.graph.plan import DraftPlan, PlanT, Predicted, Stage
from pipedream.optimizer.cost.memory import MemoryModel
from pipedream.optimizer.cost.recomputation import Offloaded, compute_seconds
from pipedream.optimizer.cost.stages import PlacedStage
from pipedream.optimizer.cost.worker_memory import (
    WorkerMemory,
    with_more_in_flight,
    workers_without_limit,
)
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.closed_form import ClosedForm


class PlacedPlan(NamedTuple):
    """A plan, its closed form and the memory of its workers."""

    plan: DraftPlan
    form: ClosedForm
    workers: list[WorkerMemory]


def placed_plan(
    cuts: Cuts,
    request: Request,
    placed: Sequence[PlacedStage],
    memory: MemoryModel | None,
    slack: int = 0,
    within: float = inf,
) -> PlacedPlan:
    """The plan with these stages; no limit is checked, and only the seconds per minibatch are
    predicted. `memory`: None where it is no limit, which leaves its figures at zero and takes a
    fraction of the time.

    As many minibatches in flight, where they fit, as keep the pace if messages take longer than
    they should, by `slack` quarters; as few as can be if stages and ports alone take longer than
    `within`. Raises UserError if --microbatches is too small for the schedule.
    """
    types, settings = request.device_types, request.settings
    if memory is None:
        workers = workers_without_limit(placed, settings, types)
    else:
        workers = request.workers(memory, placed)
    plan = unpriced_plan(cuts, request, placed, workers, update_size(request, placed))
    form = request.closed_form(plan, request.policy(plan))
    if request.in_flight == "useful" and form.bound <= within:
        useful = form.useful_in_flight(1 + slack / 4)
        if memory is None:
            workers = workers_without_limit(placed, settings, types, useful)
        else:
            workers = with_more_in_flight(memory, placed, types, workers, useful)
        plan = with_workers(plan, workers)
        form = form.under(request.policy(plan))
    predicted = plan.predicted.model_copy(update={"seconds_per_minibatch": form.seconds})
    return PlacedPlan(plan.model_copy(update={"predicted": predicted}), form, workers)


def unpriced_plan(
    cuts: Cuts,
    request: Request,
    placed: Sequence[PlacedStage],
    workers: Sequence[WorkerMemory],
    microbatches: int | None,
) -> DraftPlan:
    """The plan without predicted figures. It is not checked: it is made for every division that is
    tried.
    """
    predicted = Predicted(
        cost_model=request.model.name,
        microbatches=microbatches,
        seconds_per_minibatch=0.0,
        lower_bound_seconds=0.0,
        one_worker_seconds=0.0,
        data_parallel_seconds=0.0,
        process_bytes=None if request.process is None else request.room,
    )
    return DraftPlan.model_construct(
        graph=request.views.planned(request.graph),
        cluster=request.cluster,
        schedule=request.schedule,
        optimizer=request.optimizer,
        corrections=tuple(sorted(request.corrections)) or None,
        stages=_stages(cuts, request, placed, workers),
        predicted=predicted,
    )


def _stages(
    cuts: Cuts, request: Request, placed: Sequence[PlacedStage], workers: Sequence[WorkerMemory]
) -> tuple[Stage, ...]:
    graph = cuts.graph
    nodes = [cuts.nodes(stage.start, stage.end) for stage in placed]
    stage_of = graph.stage_of(nodes)
    names: list[list[str]] = [[] for _ in placed]
    for name in request.graph.order:
        names[stage_of[name]].append(name)
    return tuple(
        Stage(
            stage=position,
            nodes=tuple(names[position]),
            ranks=stage.ranks,
            compute_seconds=compute_seconds(graph, inside, worker.recompute) / worker.device.speed,
            parameter_bytes=float(graph.parameter_bytes[list(inside)].sum()),
            zero=worker.zero,
            **_kept(graph, names[position], worker),
            **_memory_fields(worker),
        )
        for position, (stage, inside, worker) in enumerate(zip(placed, nodes, workers, strict=True))
    )


def _kept(graph: PlanningGraph, inside: Sequence[str], worker: WorkerMemory) -> dict[str, Any]:
    """The fields of a stage that say what becomes of its activations."""
    recompute = worker.recompute
    if isinstance(recompute, Offloaded):
        return {"offload": True, "offload_seconds": recompute.seconds / worker.device.speed}
    if isinstance(recompute, bool):
        return {"recompute": recompute}
    return {"recompute": _names(graph, inside, recompute)}


def _names(
    graph: PlanningGraph, inside: Sequence[str], recompute: tuple[int, ...]
) -> tuple[str, ...]:
    """The nodes of a stage that run again, with what goes where they go."""
    again = {graph.names[node] for node in recompute}
    return tuple(n for n in inside if graph.follows.get(n, n) in again)


def with_workers(plan: PlanT, workers: Sequence[WorkerMemory]) -> PlanT:
    """The plan with what the workers of each stage hold, and as many minibatches in flight."""
    stages = tuple(
        stage.model_copy(update=_memory_fields(worker))
        for stage, worker in zip(plan.stages, workers, strict=True)
    )
    return plan.model_copy(update={"stages": stages})


def _memory_fields(worker: WorkerMemory) -> dict[str, Any]:
    return {
        "in_flight": worker.max_in_flight,
        "memory": worker.memory,
        "memory_bytes": worker.memory.total,
    }


def update_size(request: Request, placed: Sequence[PlacedStage]) -> int | None:
    """How many microbatches make one update, None for schedules that update after every minibatch.

    Raises UserError if --microbatches is too small for the schedule.
    """
    settings, replicas = request.settings, [stage.replicas for stage in placed]
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

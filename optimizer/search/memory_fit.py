"""What the workers of a plan hold; where nothing fits, which comes closest and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import TYPE_CHECKING

from pipedream.graph.errors import UserError
from pipedream.graph.plan import StageMemory as StageItems
from pipedream.graph.profile import Footprint
from pipedream.graph.units import show_bytes
from pipedream.optimizer.cost.device_types import DeviceTypes, WorstDevice
from pipedream.optimizer.cost.memory import Memory, StageMemory
from pipedream.optimizer.cost.stage_cost import LeastMemory, MemoryLimit
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.likely_cuts import prefixes
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.fill_order import build_fill_order
from pipedream.optimizer.search.hierarchical import NestedStage, Search, Solution
from pipedream.optimizer.search.latency import Done, Latency, narrowed
from pipedream.schedule.in_flight import warm_up
from pipedream.schedule.policy import Peak

FULLEST = 10**9
"""Of so many microbatches all that matters is the slowest stage: here, the fullest."""

if TYPE_CHECKING:
    from pipedream.optimizer.search.planner import Request

_FEW = 300
"""Cuts over which a remedy is tried: one that gives a plan over these gives a plan."""


@dataclass(frozen=True)
class WorkerMemory:
    """What a worker of one stage holds, for how many minibatches, and whether it recomputes.

    `max_in_flight` is the limit on minibatches in flight, which a long round of flush may reach;
    `device` describes the worst device of the stage.
    """

    peak: Peak
    max_in_flight: int
    recompute: bool
    memory: Memory
    device: WorstDevice

    @property
    def bytes(self) -> float:
        return float(self.memory.total[0])

    @property
    def part(self) -> float:
        """Of the device's memory: above 1, too much."""
        return self.bytes / self.device.memory

    @property
    def items(self) -> StageItems:
        """The memory as plan.json has it."""
        items = {item.name: getattr(self.memory, item.name)[0] for item in fields(Memory)}
        return StageItems(**items)


def worker_memory(
    held: StageMemory, limit: MemoryLimit | None, solution: Solution, device_types: DeviceTypes
) -> list[WorkerMemory]:
    """The load of each stage with the least in flight, PipeDream's number: what recomputes by the
    rule that the search goes by.
    """
    replicas = [stage.replicas for stage in solution.stages]
    positions = range(len(replicas))
    least = [warm_up(replicas, position) for position in positions]
    return [
        _worker_memory(held, solution, device_types, least, position, limit)
        for position in positions
    ]


def with_more_in_flight(
    held: StageMemory,
    solution: Solution,
    device_types: DeviceTypes,
    sure: Sequence[WorkerMemory],
    useful: Sequence[int],
) -> Sequence[WorkerMemory]:
    """The loads with as many minibatches in flight as have room, up to `useful`; `sure` are those
    with the least. Never fewer than these: slower workers than planned would want them.
    """
    positions, least = range(len(sure)), [worker.max_in_flight for worker in sure]

    def with_in_flight(position: int, max_in_flight: Sequence[int]) -> WorkerMemory:
        again = sure[position].recompute
        return _worker_memory(
            held, solution, device_types, max_in_flight, position, recompute=again
        )

    def most(position: int) -> int:
        for count in range(useful[position], least[position], -1):
            max_in_flight = [*least[:position], count, *least[position + 1 :]]
            if fit([with_in_flight(position, max_in_flight)]):
                return count
        return least[position]

    wanted = [max(both) for both in zip(useful, least, strict=True)]
    for max_in_flight in (wanted, [most(position) for position in positions]):
        found = [with_in_flight(position, max_in_flight) for position in positions]
        if fit(found):
            return found
    return sure


def _worker_memory(
    held: StageMemory,
    solution: Solution,
    device_types: DeviceTypes,
    max_in_flight: Sequence[int],
    position: int,
    limit: MemoryLimit | None = None,
    recompute: bool = False,
) -> WorkerMemory:
    """The memory with `max_in_flight` minibatches; `limit` decides whether the stage recomputes."""
    stage = solution.stages[position]
    policy = held.settings.policy([stage.replicas for stage in solution.stages], max_in_flight)
    peak, last = policy.peak(position), position == len(max_in_flight) - 1
    end = slice(stage.end, stage.end + 1)
    device = device_types.worst_of_machines(stage.shares[-1].components)
    if limit is not None:
        recompute = bool(limit.on(device).choose(stage.start, end, peak, last)[1][0])
    memory = held.of(stage.start, end, peak, recompute)
    return WorkerMemory(peak, max_in_flight[position], recompute, memory, device)


def fit(worker_memory: Sequence[WorkerMemory]) -> bool:
    """Whether every worker has what it needs."""
    return all(worker.part <= 1 for worker in worker_memory)


def nothing_fits(held: StageMemory, request: Request) -> UserError:
    """Names the stage that is too large in the plan that comes closest, and what would help."""
    cuts, again = held.cuts, request.recompute != "never"
    closest = _least(held, request, again)
    assert closest is not None
    # The least memory: as much recomputation as the user allows.
    limit = MemoryLimit(0.0, held, "always" if again else "never")
    found = worker_memory(held, limit, closest, request.device_types)
    position = max(range(len(found)), key=lambda stage: found[stage].part)
    worker = found[position]
    if worker.device.memory == request.memory:
        lacking, remedies = "--memory", [f"give at least --memory {_round_up(worker.bytes)}"]
    else:
        lacking, remedies = "memory of the cluster's kinds:", ["devices with more"]
    remedies += _remedies(held, request)
    help = ", ".join(remedies[:-1]) + " or " + remedies[-1] if remedies[1:] else remedies[0]
    return UserError(
        f"{lacking} {show_bytes(worker.device.memory)}: no plan fits; the closest needs"
        f" {show_bytes(worker.bytes)} in stage {position} of {len(closest.stages)}"
        f" ({_describe(cuts, closest.stages[position])}): {_items(worker)}; {help}"
    )


def too_many_versions(held: StageMemory, request: Request, found: Solution) -> UserError:
    """The search does not see how many versions vertical sync keeps in later stages."""
    kept = worker_memory(
        held, request.limit(held, request.device_types), found, request.device_types
    )
    position = max(range(len(kept)), key=lambda stage: kept[stage].part)
    worker = kept[position]
    return UserError(
        f"--memory {show_bytes(worker.device.memory)}: with --schedule {request.schedule} stage"
        f" {position} of {len(kept)} keeps {worker.peak.versions} versions of its weights and needs"
        f" {show_bytes(worker.bytes)}: give more, or use --schedule weight-stashing"
    )


def _least(held: StageMemory, request: Request, recompute: bool) -> Solution | None:
    """The plan whose fullest worker holds least; its cost is those bytes, as if all devices had
    what the smallest has.
    """
    machines, device_types = request.cluster.machines, request.device_types
    if request.latency is None:
        cost = LeastMemory(held, recompute, device_types.smallest_memory)
        return Search(held.cuts, machines, cost, request.rules, device_types).best()

    def cost_of(cuts: Cuts) -> LeastMemory:
        return LeastMemory(
            StageMemory(cuts, held.settings), recompute, device_types.smallest_memory
        )

    fill_order = build_fill_order(machines, device_types, request.rules, with_downstream=True)
    fullest = narrowed(held.cuts, fill_order, cost_of, Latency(FULLEST), Done.unknown).best()
    return fullest and Solution(fullest.cost / FULLEST, fullest.stages)


def _remedies(held: StageMemory, request: Request) -> Iterator[str]:
    """What would make a plan fit, each tried by planning."""
    graph, settings, again = held.cuts.graph, held.settings, request.recompute != "never"
    cuts = held.cuts if len(held.cuts) <= _FEW else Cuts(graph, prefixes(graph, _FEW))
    held = StageMemory(cuts, settings)

    def fits(held: StageMemory, request: Request, recompute: bool) -> bool:
        best = _least(held, request, recompute)
        return best is not None and best.cost <= request.device_types.smallest_memory

    helped = not again and fits(held, request, True)
    if helped:
        yield "--recompute auto"
    if settings.schedule != "flush":
        flush = StageMemory(cuts, replace(settings, schedule="flush"))
        if fits(flush, request, again):
            yield "--schedule flush"
        elif not again and not helped and fits(flush, request, True):
            yield "--schedule flush with --recompute auto"
    *inner, outer = request.cluster.machines
    for factor in (2, 4, 8):
        machines = (*inner, outer * factor)
        device_types = request.cluster.machine_kinds * factor
        changes = {"machines": machines, "machine_kinds": device_types}
        more = replace(request, cluster=request.cluster.model_copy(update=changes))
        if fits(held, more, again):
            names = request.cluster.names
            short = "--machines " + ",".join(map(str, machines))
            yield f"{machines[-1]} of the level {names[-1]}" if names else short
            break
    for part, name in ((2, "half"), (4, "a quarter of"), (8, "an eighth of")):
        smaller = StageMemory(Cuts(_batch_divided(graph, part), cuts.downsets), settings)
        if fits(smaller, request, again):
            yield f"a profile with {name} the batch"
            break


def _batch_divided(graph: PlanningGraph, part: int) -> PlanningGraph:
    """The same model with a smaller minibatch: what goes by example shrinks, parameters do not."""
    nodes = graph.graph.nodes
    smaller = graph.graph.with_nodes(
        replace(node, activation_bytes=tuple(size / part for size in node.activation_bytes))
        for node in nodes.values()
    )
    footprints = graph.footprints and {
        name: Footprint(
            saved=kept.saved / part,
            workspace=max(kept.workspace / part, nodes[name].parameter_bytes),
            given=kept.given / part,
        )
        for name, kept in graph.footprints.items()
    }
    return PlanningGraph.of(smaller, footprints)


def _items(worker: WorkerMemory) -> str:
    """What it is made of, for a person."""
    memory = worker.memory
    weights = memory.parameters + memory.weight_versions + memory.optimizer_state
    passing = memory.activations + memory.inputs + memory.workspace
    count = worker.peak.in_flight
    plural = "" if count == 1 else "es"
    return (
        f"{show_bytes(float(weights[0] + memory.gradients[0]))} for weights, optimizer and"
        f" gradients, {show_bytes(float(passing[0]))} for the activations of"
        f" {count} minibatch{plural} in flight"
    )


def _describe(cuts: Cuts, stage: NestedStage) -> str:
    names = [cuts.graph.names[node] for node in cuts.nodes(stage.start, stage.end)]
    return names[0] if len(names) == 1 else f"{len(names)} nodes, {names[0]} to {names[-1]}"


def _round_up(amount: float) -> str:
    """An amount that --memory takes and that is enough."""
    unit, factor = ("MB", 1e6) if amount >= 1e8 else ("kB", 1e3) if amount >= 1e5 else ("B", 1.0)
    return f"{ceil(amount / factor)}{unit}"

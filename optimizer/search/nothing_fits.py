"""If no plan fits the memory: which comes closest, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from math import ceil

from pipedream.graph.choices import WHOLE_STATE, Recompute, Zero
from pipedream.graph.errors import UserError
from pipedream.graph.units import show_bytes
from pipedream.optimizer.cost.device_types import DeviceTypes
from pipedream.optimizer.cost.memory import MemoryModel
from pipedream.optimizer.cost.stage_cost import LeastMemory, MemoryLimit
from pipedream.optimizer.cost.stages import NestedStage, Solution
from pipedream.optimizer.cost.worker_memory import WorkerMemory, worker_memory
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.likely_cuts import prefixes
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.fill_order import build_fill_order
from pipedream.optimizer.search.hierarchical import Search
from pipedream.optimizer.search.latency import DoneBounds, Latency, narrowed
from pipedream.optimizer.search.request import Request

FULLEST = 10**9
"""With so many microbatches only the slowest stage counts in a latency: here, the fullest."""

_FEW = 300
"""Cuts over which a remedy is tried: a plan over these is a plan."""


def fits(memory: MemoryModel, request: Request, types: DeviceTypes, solution: Solution) -> bool:
    """Whether a solution found for devices of `types` fits on the devices there are."""
    limit = request.limit(memory, types)
    workers = worker_memory(memory, limit, solution.stages, request.device_types)
    return all(worker.share <= 1 for worker in workers)


class NothingFits(UserError):
    """No plan fits. The message names the stage too large in the closest plan, and what would help.

    It is composed when it is asked for, which takes as long as some plans: a sweep never asks.
    """

    def __init__(self, memory: MemoryModel, request: Request) -> None:
        super().__init__("no plan fits")
        self._memory, self._request = memory, request

    @cached_property
    def _text(self) -> str:
        return _message(self._memory, self._request)

    def format_message(self) -> str:
        return self._text

    def __str__(self) -> str:
        return self._text


def _message(memory: MemoryModel, request: Request) -> str:
    cuts, allowed = memory.cuts, request.recompute != "never"
    closest = _least(memory, request, allowed)
    if closest is None:
        assert request.sharing
        return (
            f"parameter {request.sharing[0].parameter}: what uses it stays in one stage with"
            f" --schedule {request.schedule}, where each stage would learn its own, and then there"
            f" are too few stages for {request.cluster.devices} devices; use --schedule flush,"
            " gpipe or 2bw, or untie the weights"
        )
    # The least memory: as much recomputation as the user allows.
    by_node = _by_node(request)
    most: Recompute = "auto" if by_node else "always" if allowed else "never"
    zero: Zero = "never" if request.zero == "never" else "always"
    limit = MemoryLimit(0.0, memory, most, zero, by_node, request.host_bandwidth)
    workers = worker_memory(memory, limit, closest.stages, request.device_types)
    position, worker = max(enumerate(workers), key=lambda at: at[1].share)
    room = request.room
    least = worker.memory.total
    if by_node:  # the search counts classes of nodes, and so more than the stage may take
        least = max(
            least, closest.cost * worker.device.memory / request.device_types.smallest_memory
        )
    needed, has = least + room, worker.device.memory + room
    if has == request.memory:
        lacking, remedies = "--memory", [f"give at least --memory {_round_up(needed)}"]
    else:
        lacking, remedies = "memory of the cluster's kinds:", ["devices with more"]
    remedies += [*_dividing(memory, request), *_remedies(memory, request)]
    help = ", ".join(remedies[:-1]) + " or " + remedies[-1] if remedies[1:] else remedies[0]
    return (
        f"{lacking} {show_bytes(has)}: no plan fits; the closest needs"
        f" {show_bytes(needed)} in stage {position} of {len(closest.stages)}"
        f" ({_describe(cuts, closest.stages[position])}): {_items(worker, request)}; {help}"
    )


def check_versions(memory: MemoryModel, request: Request, solution: Solution) -> None:
    """Raises UserError for vertical sync, whose versions in later stages the search does not count,
    if they do not fit.
    """
    workers = request.workers(memory, solution.stages)
    position, worker = max(enumerate(workers), key=lambda at: at[1].share)
    if worker.share > 1:
        has, needed = (n + request.room for n in (worker.device.memory, worker.memory.total))
        raise UserError(
            f"--memory {show_bytes(has)}: with --schedule {request.schedule} stage {position} of"
            f" {len(workers)} keeps {worker.peak.versions} versions of its weights and needs"
            f" {show_bytes(needed)}: give more, or use --schedule weight-stashing"
        )


def _least(memory: MemoryModel, request: Request, recompute: bool) -> Solution | None:
    """The plan whose fullest worker holds least; its cost is those bytes, scaled as if all devices
    had what the smallest has.
    """
    machines, types, by_node = request.cluster.machines, request.device_types, _by_node(request)
    ways = request.zero != "never", by_node, by_node and request.host_bandwidth is not None
    if request.latency is None:
        cost = LeastMemory(memory, recompute, types.smallest_memory, *ways)
        return Search(memory.cuts, machines, cost, request.rules, types).best()

    def cost_of(cuts: Cuts) -> LeastMemory:
        cut_memory = MemoryModel(cuts, memory.settings)
        return LeastMemory(cut_memory, recompute, types.smallest_memory, *ways)

    fill_order = build_fill_order(machines, types, request.rules, with_downstream=True)
    goal = Latency(FULLEST)
    fullest = narrowed(memory.cuts, fill_order, cost_of, goal, DoneBounds.unknown).best()
    return fullest and fullest._replace(cost=fullest.cost / FULLEST)


def _by_node(request: Request) -> bool:
    """Whether single nodes may be recomputed."""
    return request.selective and request.recompute == "auto"


def _remedies(memory: MemoryModel, request: Request) -> Iterator[str]:
    """What would make a plan fit, each tried by planning."""
    graph, settings, allowed = memory.cuts.graph, memory.settings, request.recompute != "never"
    memory = _over_few(memory, request)
    cuts = memory.cuts

    def helps(memory: MemoryModel, request: Request, recompute: bool) -> bool:
        best = _least(memory, request, recompute)
        return best is not None and best.cost <= request.device_types.smallest_memory

    recomputing = not allowed and helps(memory, request, True)
    if recomputing:
        yield "--recompute auto"
    if settings.schedule != "flush":
        divided = Cuts(graph, prefixes(graph, _FEW)) if graph.sharing else cuts
        flush = MemoryModel(divided, replace(settings, schedule="flush"))
        if helps(flush, request, allowed):
            yield "--schedule flush"
        elif not allowed and not recomputing and helps(flush, request, True):
            yield "--schedule flush with --recompute auto"
    *inner, outer = request.cluster.machines
    for factor in (2, 4, 8):
        machines = (*inner, outer * factor)
        kinds = request.cluster.machine_kinds * factor
        changes = {"machines": machines, "machine_kinds": kinds}
        more = replace(request, cluster=request.cluster.model_copy(update=changes))
        if helps(memory, more, allowed):
            names = request.cluster.names
            short = "--machines " + ",".join(map(str, machines))
            yield f"{machines[-1]} of the level {names[-1]}" if names else short
            break
    for part, name in ((2, "half"), (4, "a quarter of"), (8, "an eighth of")):
        smaller = MemoryModel(Cuts(_batch_divided(graph, part), cuts.downsets), settings)
        if helps(smaller, request, allowed):
            yield f"a profile with {name} the batch"
            break


def _dividing(memory: MemoryModel, request: Request) -> Iterator[str]:
    """As `_remedies`: whether it helps to divide the optimizer's state."""
    whole = request.optimizer == "muon" or not request.corrections.isdisjoint(WHOLE_STATE)
    if request.zero == "never" and not whole:
        divided = replace(request, zero="auto")
        best = _least(_over_few(memory, request), divided, request.recompute != "never")
        if best is not None and best.cost <= request.device_types.smallest_memory:
            yield "--zero auto"


def _over_few(memory: MemoryModel, request: Request) -> MemoryModel:
    """The same over no more than a few cuts."""
    if len(memory.cuts) <= _FEW:
        return memory
    cuts = request.allowed_cuts(prefixes(memory.cuts.graph, _FEW))
    return MemoryModel(cuts, memory.settings)


def _batch_divided(graph: PlanningGraph, part: int) -> PlanningGraph:
    """The same model with a smaller minibatch: activations shrink, parameters do not."""
    nodes = graph.graph.nodes
    smaller = graph.graph.with_nodes(
        replace(node, activation_bytes=tuple(size / part for size in node.activation_bytes))
        for node in nodes.values()
    )
    footprints = graph.footprints and {
        name: replace(
            kept,
            saved=kept.saved / part,
            workspace=max(kept.workspace / part, nodes[name].parameter_bytes),
            input_bytes=kept.input_bytes / part,
            programs=None if kept.programs is None else kept.programs / part,
            drawn=kept.drawn / part,
        )
        for name, kept in graph.footprints.items()
    }
    return PlanningGraph.of(smaller, footprints, sharing=graph.sharing, groups=graph.groups)


def _items(worker: WorkerMemory, request: Request) -> str:
    """The items of a worker's memory in two groups, in words, and what is not its own."""
    memory, count, room = worker.memory, worker.peak.in_flight, request.room
    weights = memory.weights + memory.gradients
    passing = memory.activations + memory.recomputed + memory.inputs + memory.workspace
    passing += memory.allocator
    plural = "" if count == 1 else "es"
    return (
        f"{show_bytes(weights)} for weights, optimizer and gradients,"
        f" {show_bytes(passing)} for the activations of {count} minibatch{plural} in flight"
        + (f", {show_bytes(room)} for {request.room_for} (--room)" if room else "")
    )


def _describe(cuts: Cuts, stage: NestedStage) -> str:
    names = [cuts.graph.names[node] for node in cuts.nodes(stage.start, stage.end)]
    return names[0] if len(names) == 1 else f"{len(names)} nodes, {names[0]} to {names[-1]}"


def _round_up(amount: float) -> str:
    """An amount for --memory that is enough."""
    unit, factor = ("MB", 1e6) if amount >= 1e8 else ("kB", 1e3) if amount >= 1e5 else ("B", 1.0)
    return f"{ceil(amount / factor)}{unit}"

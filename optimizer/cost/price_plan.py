"""What a cost model says of a plan that there is, with the times of a graph that may be new."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TypeAlias

from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan
from pipedream.optimizer.cost.device_types import DeviceTypes
from pipedream.optimizer.cost.expected_time import in_a_run
from pipedream.optimizer.cost.models import CostModel
from pipedream.optimizer.cost.rank_assignment import stage_time
from pipedream.optimizer.cost.stage_cost import Replication
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.latency import Latency
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.search.stages import NestedStage, Share
from pipedream.optimizer.simulate.simulator import QUICK_MOVES, simulate_plan

_Places: TypeAlias = tuple[tuple[int, ...], ...]
"""Of each level, innermost first, the components that a stage has there."""


@dataclass(frozen=True)
class Price:
    """Seconds per minibatch by the cost model and as simulated, None where that takes too long.

    `latency`: of a batch, where that is what the plan is for; `expected`: see `Predicted`.
    """

    per_minibatch: float
    simulated: float | None = None
    latency: float | None = None
    expected: float | None = None

    @property
    def goal(self) -> float:
        """What a better plan has less of."""
        return self.per_minibatch if self.latency is None else self.latency

    @staticmethod
    def recorded_in(plan: Plan) -> Price:
        """As the plan has it."""
        predicted, simulated = plan.predicted, plan.predicted.simulated
        seconds = None if simulated is None else simulated.seconds_per_minibatch
        return Price(
            predicted.seconds_per_minibatch,
            seconds,
            predicted.latency_seconds,
            predicted.expected_seconds_per_minibatch,
        )


def price_plan(plan: Plan, request: Request) -> Price:
    """Of `plan`, which was made for the structure of the graph that `request` has, on a cluster of
    its own.

    Raises UserError where its stages are not on whole pieces of the cluster.
    """
    found = stage_times(plan, request.planning, request.model)
    times = [seconds for seconds, _ in found]
    simulation = simulate_plan(
        plan, request.graph, request.update_rate, request.overheads, QUICK_MOVES
    )
    simulated = None if simulation is None else simulation.seconds_per_minibatch
    batch = plan.predicted.microbatches
    latency = None
    if plan.predicted.objective == "latency" and batch is not None:
        latency = Latency(batch).seconds(sum(times), max(times))
    expected = in_a_run(found, plan.replicas, request.spread)
    return Price(max(times), simulated, latency, expected)


def stage_times(plan: Plan, working: PlanningGraph, model: CostModel) -> list[tuple[float, str]]:
    """Seconds per minibatch that each stage allows, and what sets them."""
    position = working.position
    pieces = [
        sum(1 << position[name] for name in stage.nodes if name in position)
        for stage in plan.stages
    ]
    cuts = Cuts(working, list(accumulate(pieces, initial=0)))
    cost, device_types = Replication(cuts, plan.cluster, model), DeviceTypes.of(plan.cluster)
    flat = plan.predicted.objective == "latency"
    of_stages = [_places(plan, stage.stage) for stage in plan.stages]
    nested = _flat(of_stages) if flat else _nested(of_stages)
    devices = [
        device_types.worst_of_machines(map(plan.cluster.machine, stage.ranks))
        for stage in plan.stages
    ]
    return [
        stage_time(cost.on(device), shares, stage.recompute)
        for device, shares, stage in zip(devices, nested, plan.stages, strict=True)
    ]


def _places(plan: Plan, stage: int) -> _Places:
    known, ranks = tuple(plan.cluster.places()), plan.stages[stage].ranks
    levels = zip(*(known[rank] for rank in ranks), strict=True)
    found = tuple(tuple(sorted(set(level))) for level in levels)
    if prod(map(len, found)) != len(ranks):
        raise UserError(
            f"the ranks of stage {stage} are no whole pieces of the cluster: no cost model says"
            " what it takes; make a plan with pd-optimize"
        )
    return found


def _nested(of_stages: list[_Places]) -> list[NestedStage]:
    """Pipelines inside replicated components: stages on the same components of a level, and of
    those outside, are one stage there.
    """
    found = []
    for stage, places in enumerate(of_stages):
        shares = []
        for level, components in enumerate(places):
            start, end = _run(of_stages, stage, level)
            outer, _ = _run(of_stages, stage, level + 1)
            shares.append(_share(level, start, end, components, first=start == outer))
        found.append(NestedStage(tuple(shares)))
    return found


def _run(of_stages: list[_Places], stage: int, level: int) -> tuple[int, int]:
    """The stages around this one that have its components of `level` and outwards; of none: all."""
    same = [places[level:] == of_stages[stage][level:] for places in of_stages]
    start = stage - same[stage::-1].index(False) + 1 if False in same[: stage + 1] else 0
    end = stage + same[stage:].index(False) if False in same[stage:] else len(same)
    return start, end


def _flat(of_stages: list[_Places]) -> list[NestedStage]:
    """One pipeline: a stage has its own cuts at every level, and is joined to the one before it at
    the outermost level where they differ.
    """
    found = []
    for stage, places in enumerate(of_stages):
        before = of_stages[stage - 1] if stage else places
        joined = max((k for k in range(len(places)) if places[k] != before[k]), default=-1)
        shares = tuple(
            _share(level, stage, stage + 1, components, first=level != joined)
            for level, components in enumerate(places)
        )
        found.append(NestedStage(shares))
    return found


def _share(level: int, start: int, end: int, components: tuple[int, ...], first: bool) -> Share:
    return Share(level + 1, start, end, components[0], len(components), first, components)

"""Prices an existing plan with the times of a graph that may be new."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Literal, TypeAlias

from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan, Stage
from pipedream.optimizer.choose.expected import expected
from pipedream.optimizer.cost.device_types import DeviceTypes
from pipedream.optimizer.cost.models import COST_MODELS
from pipedream.optimizer.cost.recomputation import Offloaded, Recomputed
from pipedream.optimizer.cost.stage_time import in_a_run, stage_time
from pipedream.optimizer.cost.stages import NestedStage, Share
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.search.latency import Latency
from pipedream.optimizer.search.request import Request

_Components: TypeAlias = tuple[tuple[int, ...], ...]
"""The components of a stage at each level, innermost first."""


@dataclass(frozen=True)
class Price:
    """Seconds per minibatch in closed form, and `simulated`, None if that takes too long.

    `latency`: seconds of a batch, for plans made for latency; `expected`: see `Predicted`;
    `chosen_by`: whether the cost model chooses plans by the closed form or by the simulation.
    """

    per_minibatch: float
    simulated: float | None = None
    latency: float | None = None
    expected: float | None = None
    chosen_by: Literal["closed form", "simulation"] = "closed form"

    @property
    def goal(self) -> float:
        """What the plan minimizes."""
        if self.latency is not None:
            return self.latency
        if self.chosen_by == "simulation" and self.simulated is not None:
            return self.simulated
        return self.per_minibatch

    @staticmethod
    def recorded_in(plan: Plan) -> Price:
        """The price recorded in the plan."""
        said, simulated = plan.predicted, plan.predicted.simulated
        seconds = None if simulated is None else simulated.seconds_per_minibatch
        expected = said.expected_seconds_per_minibatch
        by = _chosen_by(said.cost_model)
        return Price(said.seconds_per_minibatch, seconds, said.latency_seconds, expected, by)


def _chosen_by(cost_model: str) -> Literal["closed form", "simulation"]:
    known = COST_MODELS.get(cost_model)
    return "simulation" if known is not None and known(None).prices_plans else "closed form"


def price_plan(plan: Plan, request: Request) -> Price:
    """Prices `plan`, made for a graph with the structure of `request.graph`, on its own cluster.

    Raises UserError if a stage is not on whole pieces of the cluster.
    """
    simulation = request.simulate(plan)
    simulated = None if simulation is None else simulation.seconds_per_minibatch
    for_latency = plan.predicted.objective == "latency"
    batch = plan.predicted.microbatches if for_latency else None
    if request.cost_model.prices_plans:
        seconds = request.closed_form(plan, request.policy(plan)).seconds
        whole, varying = batch and batch * seconds, expected(plan, request)
        by = _chosen_by(request.model.name)
        return Price(seconds, simulated, whole, varying and varying.seconds, by)
    limits = stage_times(plan, request)
    times = [seconds for seconds, _ in limits]
    whole = batch and Latency(batch).seconds(sum(times), max(times))
    slowest = in_a_run(limits, request.all_devices(plan.replicas), request.spread_in_all)
    return Price(max(times), simulated, whole, slowest)


def stage_times(plan: Plan, request: Request) -> list[tuple[float, str]]:
    """Seconds per minibatch that each stage allows on the plan's cluster, and what limits them."""
    position = request.planning.position
    pieces = [
        sum(1 << position[name] for name in stage.nodes if name in position)
        for stage in plan.stages
    ]
    cuts = Cuts(request.planning, list(accumulate(pieces, initial=0)))
    cost = replace(request, cluster=plan.cluster).stage_cost(cuts)
    types = DeviceTypes.of(plan.cluster)
    flat = plan.predicted.objective == "latency"
    of_stages = [_components(plan, stage.stage) for stage in plan.stages]
    nested = _flat(of_stages) if flat else _nested(of_stages)
    return [
        stage_time(
            cost.on(types.worst_of_ranks(stage.ranks, plan.cluster)),
            shares,
            _recomputed(plan, stage, position),
        )
        for shares, stage in zip(nested, plan.stages, strict=True)
    ]


def _recomputed(plan: Plan, stage: Stage, position: Mapping[str, int]) -> Recomputed:
    """What the stage does with its activations, in numbers of nodes."""
    if stage.offload_seconds is not None:
        speed = min(plan.cluster.device(rank).speed for rank in stage.ranks)
        return Offloaded(stage.offload_seconds * speed)
    if isinstance(stage.recompute, bool):
        return stage.recompute
    return tuple(dict.fromkeys(position[name] for name in stage.recompute if name in position))


def _components(plan: Plan, stage: int) -> _Components:
    known, ranks = tuple(plan.cluster.places()), plan.stages[stage].ranks
    levels = zip(*(known[rank] for rank in ranks), strict=True)
    components = tuple(tuple(sorted(set(level))) for level in levels)
    if prod(map(len, components)) != len(ranks):
        raise UserError(
            f"the ranks of stage {stage} are not whole pieces of the cluster, so no cost model"
            " applies; make a plan with pd-optimize"
        )
    return components


def _nested(of_stages: list[_Components]) -> list[NestedStage]:
    """Stages of pipelines inside replicated components: stages on the same components of a level,
    and of all levels outside, are one stage there.
    """
    nested = []
    for stage, places in enumerate(of_stages):
        shares = []
        for level, components in enumerate(places):
            start, end = _run(of_stages, stage, level)
            outer, _ = _run(of_stages, stage, level + 1)
            shares.append(_share(level, start, end, components, first=start == outer))
        nested.append(NestedStage(tuple(shares)))
    return nested


def _run(of_stages: list[_Components], stage: int, level: int) -> tuple[int, int]:
    """Returns the run of stages around this one on the same components from `level` outwards."""
    same = [places[level:] == of_stages[stage][level:] for places in of_stages]
    start = stage - same[stage::-1].index(False) + 1 if False in same[: stage + 1] else 0
    end = stage + same[stage:].index(False) if False in same[stage:] else len(same)
    return start, end


def _flat(of_stages: list[_Components]) -> list[NestedStage]:
    """Stages of one flat pipeline: each has its own cuts at every level, and is joined to the one
    before it at the outermost level where they differ.
    """
    nested = []
    for stage, places in enumerate(of_stages):
        before = of_stages[max(stage - 1, 0)]
        joined = max((k for k in range(len(places)) if places[k] != before[k]), default=-1)
        shares = (
            _share(level, stage, stage + 1, components, first=level != joined)
            for level, components in enumerate(places)
        )
        nested.append(NestedStage(tuple(shares)))
    return nested


def _share(level: int, start: int, end: int, components: tuple[int, ...], first: bool) -> Share:
    return Share(level + 1, start, end, components[0], len(components), first, components)

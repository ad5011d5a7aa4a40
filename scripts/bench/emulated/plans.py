"""The plans to compare, by name: that of pd-optimize, of each cost model, and without a planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from pipedream.graph.choices import ScheduleName
from pipedream.graph.cluster import Cluster
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan
from pipedream.optimizer.choose.chooser import best_plan
from pipedream.optimizer.compare.comparison import data_parallel
from pipedream.optimizer.cost.models import COST_MODELS, DEFAULT_COST_MODEL
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.search.latency import Latency
from pipedream.optimizer.search.outcome import Outcome
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request

CHOSEN = "chosen"
"""The plan that pd-optimize makes where nothing is said of cost models."""

_FLUSHED = 4
"""Minibatches per device of an update with flush: what pd-optimize --compare has."""


def _by(cost_model: str) -> Callable[[Request], Outcome]:
    return lambda request: optimize(replace(request, model=COST_MODELS[cost_model](None)))


def _straight(request: Request) -> Outcome:
    crowded = request.cluster.devices > len(request.planning)
    return optimize(replace(request, rules=Rules(straight=True, fewer_machines=crowded)))


def _flush(request: Request) -> Outcome:
    goal = Latency(_FLUSHED * request.cluster.devices)
    return optimize(replace(request, latency=goal, schedule="flush"))


def _even(schedule: ScheduleName) -> Callable[[Request], Outcome]:
    """As many minibatches to an update as devices: what an update of data parallelism has."""
    return lambda request: best_plan(
        replace(request, schedule=schedule, microbatches=request.cluster.devices)
    )


MAKERS: Mapping[str, Callable[[Request], Outcome]] = MappingProxyType(
    {
        CHOSEN: best_plan,
        **{name: _by(name) for name in COST_MODELS},
        "straight": _straight,
        "dp": data_parallel,
        "flush": _flush,
        "flush-even": _even("flush"),
        "2bw-even": _even("2bw"),
    }
)


def make_plan(name: str, graph: Graph, cluster: Cluster) -> Plan:
    """The plan of that name. Raises UserError if there is none."""
    cost_model = COST_MODELS[DEFAULT_COST_MODEL](None)
    return MAKERS[name](Request(graph, cluster, cost_model, optimizer="sgd")).plan


def equal(one: Plan, other: Plan) -> bool:
    """Whether both are trained in the same way, whatever was predicted of them."""
    return _trained(one) == _trained(other)


def _trained(plan: Plan) -> object:
    stages = [(stage.nodes, stage.ranks, stage.in_flight) for stage in plan.stages]
    return stages, plan.schedule, plan.predicted.microbatches

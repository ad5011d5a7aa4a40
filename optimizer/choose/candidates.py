"""The plans to begin with: of the searches under every cost model, and of no search at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipedream.graph.errors import UserError
from pipedream.optimizer.choose.division import Division, in_order
from pipedream.optimizer.cost.models import MeasuredCost, NetworkCost, PaperCost, ReleasedCost
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request

_MOST_CUTS = 2_000
"""Cuts over which the search under another cost model is made."""

MODELS = (NetworkCost(), MeasuredCost(), PaperCost(), ReleasedCost())


def candidates(request: Request) -> Iterator[tuple[str, Division]]:
    """Names and divisions. Those of which there is no plan are left out."""
    graph, devices = request.planning, request.cluster.devices
    rules = request.rules
    whole = (1 << len(graph)) - 1
    if not rules.straight or devices == 1:
        yield "data parallelism", Division((whole,), in_order([devices]))
    crowded = devices > len(graph)
    straight = replace(rules, straight=True, fewer_machines=rules.fewer_machines or crowded)
    for model in MODELS:
        name = f"the search under `{model.name}`"
        yield from _found(name, replace(request, model=model))
    yield from _found("a straight pipeline", replace(request, rules=straight))
    yield from _found("a straight pipeline", replace(request, model=PaperCost(), rules=straight))


def _found(name: str, request: Request) -> Iterator[tuple[str, Division]]:
    graph = request.planning
    try:
        division = Division.of(optimize(request).plan, graph)
    except UserError:
        return
    yield name, division
    yield name, division._replace(ranks=in_order(division.replicas))

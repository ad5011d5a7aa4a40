"""The plans to begin with: of the searches under the cost models in MODELS, and of no search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipedream.graph.cluster import Cluster
from pipedream.graph.errors import UserError
from pipedream.optimizer.choose.division import Division, even_downsets, in_order
from pipedream.optimizer.cost.models import MeasuredCost, NetworkCost, PaperCost, ReleasedCost
from pipedream.optimizer.search.planner import rough_plan
from pipedream.optimizer.search.request import Request

_MOST_CUTS, _FEW_DEVICES = 300, 64
"""Cuts over which the search under another cost model is made, with up to so many devices; with
more, the fewer the more there are of them: the work goes with the squares of both.
"""

_MOST_STAGES = 64
"""Of pipelines whose stages are all alike."""

DATA_PARALLEL = "data parallelism"

MODELS = (NetworkCost(), MeasuredCost(), PaperCost(), ReleasedCost())


def data_parallel(request: Request) -> Division:
    """The whole model on every device."""
    whole = (1 << len(request.planning)) - 1
    return Division((whole,), in_order([request.cluster.devices]))


def candidates(request: Request) -> Iterator[tuple[str, Division]]:
    """Names and divisions. Those of which there is no plan are left out."""
    rules, devices = request.rules, request.cluster.devices
    if not rules.straight or devices == 1:
        yield DATA_PARALLEL, data_parallel(request)
    if request.has_many_devices and not rules.straight:
        yield from stages_alike(request)
        if not request.hurried:
            yield from _divisions("best by network", replace(request, model=NetworkCost()))
        return
    for model in MODELS:
        yield from _divisions(f"best by {model.name}", replace(request, model=model))
    if not rules.straight:
        yield from _on_fewer(request)
    crowded = devices > len(request.planning)
    straight = replace(rules, straight=True, fewer_machines=rules.fewer_machines or crowded)
    for model in (NetworkCost(), PaperCost()):
        changed = replace(request, model=model, rules=straight)
        yield from _divisions("straight pipeline", changed)


def stages_alike(request: Request) -> Iterator[tuple[str, Division]]:
    """Pipelines of as much work and as many replicas in each stage, as people make them: of many
    devices they are hard to beat, and need no search.
    """
    graph, devices = request.planning, request.cluster.devices
    for stages in range(2, min(_MOST_STAGES, len(graph)) + 1):
        if devices % stages == 0:
            ranks = in_order([devices // stages] * stages)
            yield "stages alike", Division(even_downsets(graph, stages), ranks)


def _on_fewer(request: Request) -> Iterator[tuple[str, Division]]:
    """Plans on the first half of the devices, a quarter, and so on: they may be as fast as all."""
    cluster = request.cluster
    while len(cluster.kinds) < 2 and (half := _half(cluster)) is not None:
        cluster = half
        name = f"best on {cluster.devices} devices"
        yield from _divisions(name, replace(request, cluster=cluster))


def _half(cluster: Cluster) -> Cluster | None:
    """The first half of the components of the outermost level that has several; None if they are
    not even in number, or are no more a ring, and one was measured.
    """
    machines = list(cluster.machines)
    level = max((k for k, count in enumerate(machines) if count > 1), default=0)
    if machines[level] % 2 or (machines[level] == 2 and (cluster.all_reduce or cluster.all_gather)):
        return None
    machines[level] //= 2
    kinds = cluster.machine_kinds[: machines[-1]]
    return cluster.model_copy(update={"machines": tuple(machines), "machine_kinds": kinds})


def _divisions(name: str, request: Request) -> Iterator[tuple[str, Division]]:
    most = int(_MOST_CUTS * min(1.0, _FEW_DEVICES / request.cluster.devices))
    try:
        division = Division.of(rough_plan(request, most).plan, request.planning)
    except UserError:
        return
    yield name, division
    yield name, division._replace(ranks=in_order(division.replicas))

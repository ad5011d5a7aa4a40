"""Plans made by hand for captured models."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from pipedream.graph.choices import ScheduleName
from pipedream.graph.cluster import Cluster
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan, PlannedGraph, Predicted, Stage

if TYPE_CHECKING:
    from pipedream.capture.captured import Captured


def make_plan(
    graph: Graph,
    pieces: Sequence[Sequence[str]],
    replicas: Sequence[int],
    schedule: ScheduleName = "weight-stashing",
    recompute: Collection[int] = (),
    again: Collection[str] = (),
) -> Plan:
    """A plan with these nodes and replica counts for each stage; ranks in order.

    `recompute`: the stages that do so; `again`: single nodes that do, of the others.
    """
    workers = sum(replicas)
    first = [sum(replicas[:stage]) for stage in range(len(replicas))]
    return Plan(
        graph=PlannedGraph.of(graph),
        cluster=Cluster(machines=(workers,), bandwidth=(1e9,)),
        schedule=schedule,
        stages=tuple(
            Stage(
                stage=stage,
                nodes=tuple(nodes),
                ranks=tuple(range(first[stage], first[stage] + count)),
                compute_seconds=0.0,
                parameter_bytes=0.0,
                memory_bytes=0.0,
                recompute=stage in recompute or tuple(n for n in nodes if n in again) or False,
            )
            for stage, (nodes, count) in enumerate(zip(pieces, replicas, strict=True))
        ),
        predicted=Predicted(
            cost_model="paper",
            seconds_per_minibatch=0.0,
            lower_bound_seconds=0.0,
            one_worker_seconds=0.0,
            data_parallel_seconds=0.0,
        ),
    )


def cut(graph: Graph, stages: int) -> list[list[str]]:
    """The nodes in topological order, in pieces of about equal length."""
    order = list(graph.order)
    ends = [len(order) * (stage + 1) // stages for stage in range(stages)]
    return [order[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def chain_plan(captured: Captured, replicas: tuple[int, ...]) -> Plan:
    """Of `small_models.Chain`: a stage for each of its layers a, b and c, or a and the others."""
    letters = ["a", "b", "c"] if len(replicas) == 3 else ["a", "bc"]
    pieces: list[list[str]] = [[] for _ in letters]
    for node in captured.graph.order:
        path = captured.module_paths[node] or "a"
        (stage,) = (s for s, held in enumerate(letters) if path[0] in held)
        pieces[stage].append(node)
    return make_plan(captured.graph, pieces, replicas)

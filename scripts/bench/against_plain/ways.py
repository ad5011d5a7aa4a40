"""The ways in which a model is trained beside the plain loop: plans, minibatches, who trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from plain_loop import AUTOCAST, SCALES, Microbatch, Update, weights_dtype

from pipedream.capture.captured import Captured
from pipedream.graph.cluster import Cluster
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan, PlannedGraph, Predicted, Stage

MICROBATCHES = 4
"""Minibatches of an update for pd-train, parts of a minibatch for Pipeline."""


@dataclass(frozen=True)
class Minibatches:
    """Their `sizes`; the examples come in their order. `cut`: Pipeline makes an update of each, cut
    in microbatches; pd-train makes one of several.
    """

    sizes: Sequence[int]
    cut: bool = False

    @property
    def examples(self) -> int:
        return sum(self.sizes)

    @property
    def bounds(self) -> Iterator[tuple[int, int]]:
        for number, size in enumerate(self.sizes):
            begin = sum(self.sizes[:number])
            yield begin, begin + size

    def updates(self, batched: bool) -> list[Update]:
        """For the plain loop, which takes a minibatch whole unless its examples are `batched`."""
        minibatches = [self._pieces(*bounds, batched) for bounds in self.bounds]
        each = 1 if self.cut else MICROBATCHES
        return [minibatches[i : i + each] for i in range(0, len(minibatches), each)]

    def _pieces(self, begin: int, end: int, batched: bool) -> list[Microbatch]:
        if not (self.cut and batched):
            return [Microbatch(begin, end)]
        each = -(-(end - begin) // MICROBATCHES)
        ends = [min(at + each, end) for at in range(begin, end, each)]
        pairs = zip([begin, *ends], ends, strict=False)
        return [Microbatch(a, b, (b - a) / (end - begin)) for a, b in pairs]


MINIBATCHES: Mapping[str, Minibatches] = {
    "of 3": Minibatches((3,) * 9 + (1,)),
    "of 1": Minibatches((1,) * 6),
    "of 7": Minibatches((7, 7, 1, 7, 3, 7, 1, 7, 7, 2), cut=True),
}


@dataclass(frozen=True)
class Way:
    """By stage the `replicas`, and on which `mesh` each is, if on any."""

    replicas: tuple[int, ...]
    order: str = "1f1b"
    mesh: tuple[int, ...] | None = None
    minibatches: str = "of 3"

    @property
    def by_pipeline(self) -> bool:
        """Whether Pipeline trains, in a loop of the user's own, and not pd-train."""
        return MINIBATCHES[self.minibatches].cut


HALVES = "zb-h1"
WAYS: Mapping[str, Way] = {
    "1": Way((1,)),
    "2": Way((1, 1)),
    "3": Way((1, 1, 1)),
    "2,1": Way((2, 1)),
    "mesh 2": Way((1,), mesh=(2,)),
    "2 zb": Way((1, 1), HALVES),
    "3 zb": Way((1, 1, 1), HALVES),
    "2,2 zb": Way((2, 2), HALVES),
    "mesh 2 zb": Way((1, 1), HALVES, mesh=(2,)),
    "2 of 1": Way((1, 1), minibatches="of 1"),
    "2 zb of 1": Way((1, 1), HALVES, minibatches="of 1"),
    "Pipeline 2": Way((1, 1), minibatches="of 7"),
    "Pipeline 2,1": Way((2, 1), minibatches="of 7"),
    "Pipeline 3": Way((1, 1, 1), minibatches="of 7"),
}


def make_plan(captured: Captured, way: Way, shard: Mapping[str, str]) -> Plan:
    """Stages of about as many nodes, on ranks in order; `shard` as `Compared` has it."""
    graph, stages, first = captured.graph, [], 0
    for number, nodes in enumerate(pieces(graph, len(way.replicas))):
        devices = (way.mesh or (1,))[0]
        ranks = range(first, first + way.replicas[number] * devices)
        first = ranks.stop
        stage = {"stage": number, "nodes": nodes, "ranks": tuple(ranks), "in_flight": MICROBATCHES}
        if way.mesh is not None:
            held = [name for node in nodes for name in captured.parameters[node]]
            stage |= {"mesh": way.mesh, "placements": {"parameters": _present(shard, held)}}
        stages.append(stage | {"compute_seconds": 0, "parameter_bytes": 0, "memory_bytes": 0})
    nothing = dict.fromkeys(Predicted.model_fields.keys() & _SECONDS, 0.0)
    return Plan(
        graph=PlannedGraph.of(graph),
        cluster=Cluster(machines=(first,), bandwidth=(1e9,)),
        schedule="flush",
        stages=tuple(Stage.model_validate(stage) for stage in stages),
        predicted=Predicted(cost_model="paper", **nothing),
        order=None if way.order == "1f1b" else way.order,
    )


_SECONDS = {
    "seconds_per_minibatch",
    "lower_bound_seconds",
    "one_worker_seconds",
    "data_parallel_seconds",
}


def _present(shard: Mapping[str, str], held: Sequence[str]) -> dict[str, str]:
    return {
        pattern: placement
        for pattern, placement in shard.items()
        if any(fnmatchcase(name, pattern) for name in held)
    }


def pieces(graph: Graph, stages: int) -> list[tuple[str, ...]]:
    """In topological order; inputs belong to the first stage beside its share."""
    inputs = [name for name in graph.order if graph.nodes[name].is_input]
    others = [name for name in graph.order if name not in inputs]
    ends = [len(others) * (stage + 1) // stages for stage in range(stages)]
    first, *rest = (tuple(others[b:e]) for b, e in zip([0, *ends], ends, strict=False))
    return [(*inputs, *first), *rest]


def run_config(name: str, loss: str, precision: str, way: Way, seed: int, **sgd: float) -> Any:
    """For pd-train, as run.yaml has it."""
    examples = {"name": name, "count": MINIBATCHES[way.minibatches].examples}
    lowered = {"autocast": precision} if precision in AUTOCAST else {}
    scaled = {"loss_scale": SCALES[precision]} if precision in SCALES else {}
    return {
        "format": "pipedream-run/1",
        "model": {"source": "compared_models:make", "args": {"name": name}},
        "data": {"source": "compared_models:examples", "args": examples},
        "sampler": {"source": "torch.utils.data:SequentialSampler"},
        "loss": loss,
        "optimizer": {"name": "SGD", "args": sgd},
        "batch_size": MINIBATCHES[way.minibatches].sizes[0],
        "microbatches": MICROBATCHES,
        "seed": seed,
        "dtype": str(weights_dtype(precision)).removeprefix("torch."),
        **lowered,
        **scaled,
    }

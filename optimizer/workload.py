"""What each stage of a plan has to do for one minibatch, and what it sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan
from pipedream.runtime.schedule import Link


@dataclass(frozen=True)
class StageWork:
    """Seconds of one minibatch on one worker, and bytes that the worker holds.

    `update_seconds`: of the optimizer's step; `stash_bytes` for each minibatch in flight: the
    outputs of the stage's nodes and what it has received.
    """

    forward_seconds: float
    backward_seconds: float
    update_seconds: float = 0.0
    parameter_bytes: float = 0.0
    stash_bytes: float = 0.0

    def at(self, speed: float) -> StageWork:
        """The same work on a device that is `speed` times as fast."""
        return replace(
            self,
            forward_seconds=self.forward_seconds / speed,
            backward_seconds=self.backward_seconds / speed,
            update_seconds=self.update_seconds / speed,
        )


@dataclass(frozen=True)
class Workload:
    """The stages, and for each pair of them that exchange tensors the bytes of a minibatch that go
    forward and those that come back.
    """

    stages: tuple[StageWork, ...]
    forward_bytes: Mapping[Link, float]
    backward_bytes: Mapping[Link, float]

    @staticmethod
    def of(plan: Plan, graph: Graph, update_rate: float) -> Workload:
        """The work of `plan` with the times and sizes of `graph`.

        `update_rate`: bytes of parameters that the optimizer takes through a step in a second. A
        tensor goes once to each stage that reads it. Inputs of the model are read by each stage for
        itself. A gradient of the same size comes back where anything before it learns.
        """
        stage_of = plan.stage_of
        forward: dict[Link, float] = defaultdict(float)
        backward: dict[Link, float] = defaultdict(float)
        received = [0.0] * len(plan.stages)
        learning = _learning(graph)
        for name, node in graph.nodes.items():
            if node.is_input and not graph.predecessors[name]:
                continue
            readers = {stage_of[reader] for reader in graph.successors[name]} - {stage_of[name]}
            for target in readers:
                link = stage_of[name], target
                forward[link] += node.output_bytes
                backward[link] += node.output_bytes if name in learning else 0.0
                received[target] += node.output_bytes
        stages = []
        for stage, read in zip(plan.stages, received, strict=True):
            nodes = [graph.nodes[name] for name in stage.nodes]
            parameters = sum(node.parameter_bytes for node in nodes)
            outputs = sum(node.output_bytes for node in nodes if not node.is_input)
            forward_seconds = sum(node.forward_seconds for node in nodes if not node.is_input)
            work = StageWork(
                forward_seconds=forward_seconds,
                backward_seconds=sum(node.backward_seconds for node in nodes if not node.is_input)
                + (forward_seconds if stage.recompute else 0.0),
                update_seconds=parameters / update_rate,
                parameter_bytes=parameters,
                stash_bytes=read if stage.recompute else outputs + read,
            )
            stages.append(work)
        return Workload(tuple(stages), dict(forward), dict(backward))


def _learning(graph: Graph) -> frozenset[str]:
    """The nodes through which a gradient flows: they or what feeds them have parameters, or at
    least a backward pass that takes time.
    """
    found: set[str] = set()
    for name in graph.order:
        node = graph.nodes[name]
        own = node.parameter_bytes > 0 or node.backward_seconds > 0
        if own or found.intersection(graph.predecessors[name]):
            found.add(name)
    return frozenset(found)

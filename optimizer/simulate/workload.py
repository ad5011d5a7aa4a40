"""What each stage of a plan has to do for one minibatch, and what it sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan, StageMemory
from pipedream.graph.profile import TrainingOverheads
from pipedream.schedule.action import Link
from pipedream.schedule.policy import Peak, Policy

UPDATE_RATE = 5e10
"""Bytes of parameters a device updates in a second where nobody has measured it: an optimizer with
two moments moves ten times as many, and a GPU some 5e11 bytes of memory in a second."""


@dataclass(frozen=True)
class Held:
    """Bytes on one worker: always; for each older version of the weights; for each minibatch in
    flight; while a backward pass lasts; from then to the update.
    """

    always: float = 0.0
    version: float = 0.0
    minibatch: float = 0.0
    backward: float = 0.0
    gradients: float = 0.0

    @staticmethod
    def of(memory: StageMemory | None, peak: Peak, recompute: bool) -> Held:
        """What makes up `memory`, that of the fullest moment with `peak` in flight.

        Nothing where the planner has not said.
        """
        if memory is None:
            return Held()
        passing = memory.workspace + memory.gradients
        return Held(
            always=memory.parameters + memory.optimizer_state,
            version=memory.weight_versions / max(1, peak.versions - 1),
            minibatch=(memory.inputs + (0.0 if recompute else memory.activations)) / peak.in_flight,
            backward=passing + (memory.activations if recompute else 0.0),
            gradients=memory.parameters,
        )


@dataclass(frozen=True)
class StageWork:
    """Seconds of one minibatch on one worker, `update_seconds` those of the optimizer's step; the
    bytes of the parameters, and all that the worker holds.
    """

    forward_seconds: float
    backward_seconds: float
    update_seconds: float = 0.0
    parameter_bytes: float = 0.0
    held: Held = Held()

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
    def of(
        plan: Plan,
        policy: Policy,
        graph: Graph,
        update_rate: float,
        overheads: TrainingOverheads | None = None,
    ) -> Workload:
        """The work of `plan` with the times and sizes of `graph`; `policy` is its schedule's.

        `update_rate`: bytes of parameters that the optimizer takes through a step in a second;
        `overheads` says what a pass takes beside its nodes. A
        tensor goes once to each stage that reads it. Inputs of the model are read by each stage for
        itself. A gradient of the same size comes back where anything before it learns.
        """
        stage_of = plan.stage_of
        forward: dict[Link, float] = defaultdict(float)
        backward: dict[Link, float] = defaultdict(float)
        learning = _learning(graph)
        for name, node in graph.nodes.items():
            if node.is_input and not graph.predecessors[name]:
                continue
            readers = {stage_of[reader] for reader in graph.successors[name]} - {stage_of[name]}
            for target in readers:
                link = stage_of[name], target
                forward[link] += node.output_bytes
                backward[link] += node.output_bytes if name in learning else 0.0
        stages = []
        for stage in plan.stages:
            nodes = [graph.nodes[name] for name in stage.nodes]
            parameters = sum(node.parameter_bytes for node in nodes)
            overhead = (overheads or TrainingOverheads({})).of_stage(stage.stage, len(plan.stages))
            working = [node for node in nodes if not node.is_input]
            forward_seconds = overhead[0] + sum(node.forward_seconds for node in working)
            work = StageWork(
                forward_seconds=forward_seconds,
                backward_seconds=overhead[1]
                + sum(node.backward_seconds for node in working)
                + (forward_seconds if stage.recompute else 0.0),
                update_seconds=parameters / update_rate,
                parameter_bytes=parameters,
                held=Held.of(stage.memory, policy.peak(stage.stage), stage.recompute),
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

"""What is simulated: the work of each stage per minibatch, the bytes it sends; and the result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan, Simulated
from pipedream.graph.profile import TrainingOverheads
from pipedream.graph.timeline import Event
from pipedream.optimizer.cost.memory import HeldBytes
from pipedream.schedule.action import StageLink
from pipedream.schedule.policy import Policy

UPDATE_RATE = 5e10
"""Default bytes of parameters a device updates per second: an optimizer with two moments moves
ten times as many bytes, and a GPU about 5e11 per second."""


@dataclass(frozen=True)
class StageWork:
    """The work of one worker: seconds of a minibatch's passes and of an optimizer step, bytes of
    parameters, and memory held.
    """

    forward_seconds: float
    backward_seconds: float
    update_seconds: float = 0.0
    parameter_bytes: float = 0.0
    memory: HeldBytes = field(default_factory=HeldBytes)

    def at(self, speed: float) -> StageWork:
        """The same work on a device of relative `speed`."""
        return replace(
            self,
            forward_seconds=self.forward_seconds / speed,
            backward_seconds=self.backward_seconds / speed,
            update_seconds=self.update_seconds / speed,
        )


@dataclass(frozen=True)
class Workload:
    """The work of each stage, and for each link between stages the bytes per minibatch that go
    forward and come back.
    """

    stages: tuple[StageWork, ...]
    forward_bytes: Mapping[StageLink, float]
    backward_bytes: Mapping[StageLink, float]

    @staticmethod
    def of(
        plan: Plan,
        policy: Policy,
        graph: Graph,
        update_rate: float,
        overheads: TrainingOverheads | None = None,
    ) -> Workload:
        """The work of `plan` with the times and sizes of `graph` under the schedule's `policy`.

        `update_rate`: bytes of parameters that the optimizer updates per second; `overheads`:
        seconds of a pass besides its nodes. A tensor is sent once to each stage that reads it; each
        stage reads the model's inputs itself. A gradient of the same size comes back if anything
        before the tensor learns.
        """
        stage_of = plan.stage_of
        forward: dict[StageLink, float] = defaultdict(float)
        backward: dict[StageLink, float] = defaultdict(float)
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
                memory=HeldBytes.of(stage.memory, policy.peak(stage.stage), stage.recompute),
            )
            stages.append(work)
        return Workload(tuple(stages), dict(forward), dict(backward))


def _learning(graph: Graph) -> frozenset[str]:
    """The nodes through which a gradient flows: they or nodes that feed them have parameters or a
    backward pass that takes time.
    """
    learning: set[str] = set()
    for name in graph.order:
        node = graph.nodes[name]
        own = node.parameter_bytes > 0 or node.backward_seconds > 0
        if own or learning.intersection(graph.predecessors[name]):
            learning.add(name)
    return frozenset(learning)


@dataclass(frozen=True)
class Simulation:
    """How a schedule went.

    `seconds_per_minibatch` and `bubble`, the share of the workers' time in which they neither
    compute nor update, are of the steady state, which begins with minibatch `steady_from`.
    `events` and `memory` are by rank; memory is a list of (second, bytes held from then on).
    """

    seconds_per_minibatch: float
    bubble: float
    steady_from: int
    events: Mapping[int, Sequence[Event]]
    memory: Mapping[int, Sequence[tuple[float, float]]]

    def noted_in(self, plan: Plan) -> Plan:
        """The plan with the figures of its simulation."""
        figures = Simulated(seconds_per_minibatch=self.seconds_per_minibatch, bubble=self.bubble)
        predicted = plan.predicted.model_copy(update={"simulated": figures})
        return plan.model_copy(update={"predicted": predicted})

"""What is simulated: the work of each stage per minibatch, and the bytes it sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipedream.graph.model import Graph, Node
from pipedream.graph.plan import Plan
from pipedream.graph.profile import TrainingOverheads
from pipedream.optimizer.cost.memory import HeldBytes
from pipedream.schedule.action import StageLink
from pipedream.schedule.overlap import BUCKET_BYTES
from pipedream.schedule.policy import Policy

UPDATE_RATE = 5e10
"""Default bytes of parameters a device updates per second: an optimizer with two moments moves
ten times as many bytes, and a GPU about 5e11 per second."""


_MOST_PARTS = 4
"""Sums of one round that are played one by one; further buckets are joined to these."""


@dataclass(frozen=True)
class StageWork:
    """The work of one worker: seconds of a minibatch's passes and of an optimizer step, bytes of
    parameters, and memory held.

    `parts` of the sum over replicas: bytes, and the share of the backward pass after which their
    gradients are there [default: all bytes after all of it].
    """

    forward_seconds: float
    backward_seconds: float
    update_seconds: float = 0.0
    parameter_bytes: float = 0.0
    memory: HeldBytes = field(default_factory=HeldBytes)
    parts: tuple[tuple[float, float], ...] = ()

    @property
    def sums(self) -> tuple[tuple[float, float], ...]:
        return self.parts or ((self.parameter_bytes, 1.0),)

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
        for name, readers in graph.read_nodes:
            here = stage_of[name]
            across = {there for reader in readers if (there := stage_of[reader]) != here}
            for there in across:
                sent = graph.nodes[name].output_bytes
                forward[here, there] += sent
                backward[here, there] += sent if name in graph.learning else 0.0
        stages = []
        for stage in plan.stages:
            nodes = [graph.nodes[name] for name in stage.nodes]
            overhead = (overheads or TrainingOverheads({})).of_stage(stage.stage, len(plan.stages))
            parameters, (forward_seconds, backward_seconds) = 0.0, overhead
            for node in nodes:
                parameters += node.parameter_bytes
                if not node.is_input:
                    forward_seconds += node.forward_seconds
                    backward_seconds += node.backward_seconds
            again = forward_seconds if stage.recompute else 0.0
            backward_seconds += again
            work = StageWork(
                forward_seconds=forward_seconds,
                backward_seconds=backward_seconds,
                update_seconds=parameters / update_rate,
                parameter_bytes=parameters,
                memory=HeldBytes.of(stage.memory, policy.peak(stage.stage), stage.recompute),
                parts=_parts(nodes, again, backward_seconds),
            )
            stages.append(work)
        return Workload(tuple(stages), dict(forward), dict(backward))


def _parts(
    nodes: Sequence[Node], again: float, backward_seconds: float
) -> tuple[tuple[float, float], ...]:
    """The sums of a stage, as in `StageWork`, whose backward pass of so many seconds begins with
    `again` seconds of recomputation. Gradients come node by node, in reverse, and are sent as
    buckets as soon as one is full (comm/buckets.py).
    """
    buckets: list[tuple[float, float]] = []
    room, elapsed = 0.0, again
    for node in reversed(nodes):
        elapsed += 0.0 if node.is_input else node.backward_seconds
        room -= node.parameter_bytes
        if room < 0 or not buckets:
            buckets.append((0.0, 0.0))
            room = BUCKET_BYTES - node.parameter_bytes
        if node.parameter_bytes:
            after = min(1.0, elapsed / backward_seconds) if backward_seconds else 1.0
            buckets[-1] = (buckets[-1][0] + node.parameter_bytes, after)
    total = sum(amount for amount, _ in buckets)
    parts: dict[int, tuple[float, float]] = {}
    before = 0.0
    for amount, after in buckets:
        if amount:
            place = int(before / total * _MOST_PARTS)
            parts[place] = (parts.get(place, (0.0, 0.0))[0] + amount, after)
            before += amount
    return tuple(parts.values())

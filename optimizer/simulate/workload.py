"""What is simulated: the work of each stage per minibatch, and the bytes it sends."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pipedream.graph.model import Graph, NodeArrays
from pipedream.graph.plan import DraftPlan
from pipedream.graph.profile import TrainingOverheads
from pipedream.optimizer.cost.memory import HeldBytes
from pipedream.optimizer.cuts.planning_graph import Floats
from pipedream.schedule.action import StageLink
from pipedream.schedule.overlap import BUCKET_BYTES
from pipedream.schedule.policy import Policy

UPDATE_RATE = 5e10
"""Default bytes of parameters a device updates per second: an optimizer with two moments moves
ten times as many bytes, and a GPU about 5e11 per second."""

MUON_UPDATE_RATE = 1e10
"""The same of Muon: five Newton-Schulz steps on a matrix with sides of 4,096 take 3e4 flops for
each of its bytes, and a GPU does about 3e14 per second."""

_MOST_PARTS = 4
"""Sums of one round that are played one by one; further buckets are joined to these."""


@dataclass(frozen=True)
class StageWork:
    """The work of one worker: seconds of a minibatch's passes and of an optimizer step, bytes of
    parameters, and memory held.

    `input_share`: of the backward pass, if it is divided, what BI takes, the gradients of the
    inputs; the rest is BW, that of the weights [default: half].
    `parts` of the sum over replicas: bytes, and the share of the backward pass after which their
    gradients are there [default: all bytes after all of it]. `gathered_bytes`: of an all-reduce
    that takes as long as the all-gather after an update that replicas divide. `sum_seconds`: to add
    gradients to those of earlier minibatches, which the first of a round does not; of it
    `sum_seconds_each` is in the backward pass, which is the mean over a round.
    """

    forward_seconds: float
    backward_seconds: float
    update_seconds: float = 0.0
    parameter_bytes: float = 0.0
    memory: HeldBytes = field(default_factory=HeldBytes)
    parts: tuple[tuple[float, float], ...] = ()
    input_share: float = 0.5
    gathered_bytes: float = 0.0
    sum_seconds: float = 0.0
    sum_seconds_each: float = 0.0

    @property
    def backward_input_seconds(self) -> float:
        return self.input_share * self.backward_seconds

    @property
    def backward_weight_seconds(self) -> float:
        return self.backward_seconds - self.backward_input_seconds

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
            sum_seconds=self.sum_seconds / speed,
            sum_seconds_each=self.sum_seconds_each / speed,
        )


@dataclass(frozen=True)
class Workload:
    """The work of each stage, and by link the bytes per minibatch that go forward and back."""

    stages: tuple[StageWork, ...]
    forward_bytes: Mapping[StageLink, float]
    backward_bytes: Mapping[StageLink, float]

    @staticmethod
    def of(
        plan: DraftPlan,
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
        arrays = graph.arrays
        own = [np.array([arrays.place[n] for n in stage.nodes], int) for stage in plan.stages]
        forward, backward = _crossing(own, arrays)
        stages = []
        for stage, nodes in zip(plan.stages, own, strict=True):
            overhead = (overheads or TrainingOverheads({})).of_stage(stage.stage, len(plan.stages))
            forward_seconds = _total(overhead[0], arrays.forward[nodes])
            again = forward_seconds if stage.recomputes_all else 0.0
            again += _total(0.0, arrays.forward[[arrays.place[n] for n in stage.recomputed_nodes]])
            backward_seconds = _total(overhead[1], arrays.backward[nodes]) + again
            if stage.offload_seconds is not None:  # what is not hidden beside the passes
                speed = min(plan.cluster.device(rank).speed for rank in stage.ranks)
                passes = forward_seconds + backward_seconds
                backward_seconds += max(0.0, stage.offload_seconds * speed - passes)
            parameters = _total(0.0, arrays.parameters[nodes])
            updated = _total(0.0, arrays.updated[nodes])
            summing = summed_each = 0.0
            if overheads is not None:
                round_size = policy.round_size(stage.stage) / len(stage.ranks)
                summing = parameters / overheads.gradient_sum_rate
                summed_each = parameters * overheads.sum_seconds(round_size)
            backward_seconds += summed_each
            of_inputs, kept = again, math.nan  # the first half of a stage that sends no gradients
            if any(back for (_, target), back in backward.items() if target == stage.stage):
                of_inputs += _total(overhead[1], arrays.backward_input[nodes])
                kept = _total(0.0, arrays.kept[nodes])
            # A reduce-scatter, and then an all-gather, move half of what an all-reduce does.
            summed = 0.5 if stage.zero else 1.0
            work = StageWork(
                forward_seconds=forward_seconds,
                backward_seconds=backward_seconds,
                update_seconds=updated / update_rate / (stage.replicas if stage.zero else 1),
                parameter_bytes=parameters,
                memory=HeldBytes.of(stage.memory, policy.peak(stage.stage), kept),
                parts=(
                    _parts(nodes, arrays, again, backward_seconds, summed)
                    if len(stage.ranks) > 1
                    else ()
                ),
                input_share=of_inputs / backward_seconds if backward_seconds else 0.5,
                gathered_bytes=parameters / 2 if stage.zero else 0.0,
                sum_seconds=summing,
                sum_seconds_each=summed_each,
            )
            stages.append(work)
        return Workload(tuple(stages), dict(forward), dict(backward))


def _crossing(
    own: Sequence[NDArray[np.int64]], arrays: NodeArrays
) -> tuple[dict[StageLink, float], dict[StageLink, float]]:
    """Returns by link the bytes that go forward and back; `own`: places of each stage's nodes."""
    stage_of = np.empty(len(arrays.place), int)
    for stage, nodes in enumerate(own):
        stage_of[nodes] = stage
    sources, readers = arrays.reads
    there = stage_of[readers]
    across = stage_of[sources] != there
    forward: dict[StageLink, float] = defaultdict(float)
    backward: dict[StageLink, float] = defaultdict(float)
    once = np.unique(np.stack([sources, there])[:, across], axis=1)
    for source, target in once.T.tolist():
        link = int(stage_of[source]), target
        forward[link] += float(arrays.sent[source])
        backward[link] += float(arrays.returned[source])
    return forward, backward


def _total(first: float, others: Floats) -> float:
    """Returns the sum, added up one after the other."""
    return float(np.cumsum(np.concatenate(([first], others)))[-1])


def _parts(
    nodes: NDArray[np.int64],
    arrays: NodeArrays,
    again: float,
    backward_seconds: float,
    summed: float,
) -> tuple[tuple[float, float], ...]:
    """The sums of a stage, as in `StageWork`, whose backward pass of so many seconds begins with
    `again` seconds of recomputation. Gradients come node by node, in reverse, and are sent as
    buckets as soon as one is full (comm/buckets.py), of which the sum moves the share `summed` of
    an all-reduce.
    """
    reverse = nodes[::-1]
    elapsed = np.cumsum(np.concatenate(([again], arrays.backward[reverse])))[1:]
    share = (
        np.minimum(1.0, elapsed / backward_seconds) if backward_seconds else np.ones_like(elapsed)
    )
    parameters = arrays.parameters[reverse]
    learning = parameters > 0
    buckets: list[tuple[float, float]] = []
    room = 0.0
    for size, after in zip(parameters[learning].tolist(), share[learning].tolist(), strict=True):
        room -= size
        if room < 0 or not buckets:
            buckets.append((0.0, 0.0))
            room = BUCKET_BYTES - size
        buckets[-1] = (buckets[-1][0] + size, after)
    total = sum(amount for amount, _ in buckets)
    parts: dict[int, tuple[float, float]] = {}
    before = 0.0
    for amount, after in buckets:
        place = int(before / total * _MOST_PARTS)
        parts[place] = (parts.get(place, (0.0, 0.0))[0] + amount * summed, after)
        before += amount
    return tuple(parts.values())

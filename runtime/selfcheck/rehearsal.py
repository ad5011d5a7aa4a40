"""The first round of a run, once more and before it: through the pipeline, without an update.

Everything takes part that training has: stages in the form in which they run (autograd, programs,
compiled, devices of a mesh), messages, sums over replicas, random numbers, buffers. Losses,
gradients and buffers have to be those of the captured model in one process.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pipedream.capture.equivalence import Tolerance, difference, gradient_of
from pipedream.capture.export import Captured
from pipedream.comm.memory import free_memory
from pipedream.comm.store_messages import broadcast, receive_message, send_message
from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.graph.errors import UserError
from pipedream.graph.units import show_bytes
from pipedream.runtime.data.reader import Batch
from pipedream.runtime.engine.action_stream import ActionStream
from pipedream.runtime.engine.engine import Engine
from pipedream.runtime.engine.training_segment import TrainingSegment
from pipedream.runtime.engine.weights import Weights
from pipedream.runtime.local_stage import LocalStage
from pipedream.runtime.optim.stepping import Scale, scale_of
from pipedream.runtime.selfcheck.fingerprint import Fingerprint, apart, fingerprint
from pipedream.runtime.selfcheck.reference import (
    Expected,
    Settings,
    buffer_on,
    expected,
    loss_of,
)
from pipedream.runtime.stages.partition import StageInterface, links
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PipelineSpec

if TYPE_CHECKING:
    from pipedream.runtime.rank_context import RankContext


def rehearse(context: RankContext) -> None:
    """Raises UserError on all ranks if the pipeline does not compute what the model does.

    To be called by all ranks when they have met, and before any has trained.
    """
    local = context.local
    for numbers in _rounds(context):
        key = f"self-check/{numbers[0]}"
        batches = _Batches(context, numbers)
        wanted = _expected(context, key, batches)
        if wanted is None:
            break
        figures = _Rehearsal(context, batches).run()
        _agree(context, key, _worst(local.rank_info.rank, wanted, figures))
    local.captures = None


def _rounds(context: RankContext) -> list[list[int]]:
    """The minibatches of each: one that all replicas have a part in, and the smaller last one."""
    local, job = context.local, context.local.job
    sizes, replicas = local.examples.sizes, job.plan.replicas
    most = max(replicas)
    if job.order != DEFAULT_ORDER:  # all kinds of passes come in so many
        most *= len(replicas)
    if job.policy.drains:
        most = min(most, job.config.microbatches)
    whole = len(sizes) - bool(sizes.rest)
    first = list(range(min(most, whole)))
    return [first, [sizes.last]] if sizes.last is not None else [first]


def _spec(context: RankContext, minibatches: int) -> PipelineSpec:
    """The pipeline of the run, with one update after so many minibatches."""
    local, job = context.local, context.local.job
    spec = replace(job.spec(links(local.interfaces), local.tied), joint_norm=False, accumulate=1)
    if job.policy.drains:
        return spec
    return replace(spec, name="flush", microbatches=minibatches, max_in_flight=None)


class _Batches:
    """Minibatches of the first epoch, by number; where data are a stream or vary in shape, the
    first one for all.
    """

    def __init__(self, context: RankContext, numbers: Sequence[int]) -> None:
        self.numbers, local = list(numbers), context.local
        self.examples, self.first, self.device = local.examples, local.first, local.device
        self.read: dict[int, Batch] = {}

    def of(self, number: int) -> Batch:
        """On the CPU."""
        if number not in self.read:
            self.read[number] = self._read(number)
        return self.read[number]

    def _read(self, number: int) -> Batch:
        sizes, varying = self.examples.sizes, self.examples.config.data.varying
        if self.examples.stream is None and not varying:
            return self.examples.epoch(1).batch(number)
        return self.first.first(sizes.of(number)) if not varying else self.first

    def inputs(self, minibatch: int, which: Iterable[int]) -> list[Tensor]:
        tensors = self.of(minibatch).to(self.device).inputs
        return [tensors[position] for position in which]

    def target(self, minibatch: int) -> Any:
        return self.of(minibatch).to(self.device).target

    def peek(self, minibatch: int) -> Batch:
        return self.of(minibatch)


def _expected(context: RankContext, key: str, batches: _Batches) -> Mapping[str, Expected] | None:
    """The figures of the captured model, which rank 0 computes; None if it has no room for it."""
    local, told = context.local, None
    context.say("at the self-check")
    if local.rank_info.rank == 0:
        assert local.captures is not None
        tolerance = local.captures.tolerance
        if tolerance is not None and _has_room(context):
            figures = _by_reference(context, batches, tolerance)
            told = {what: astuple(each) for what, each in figures.items()}
    told = broadcast(context.store, local.rank_info, key, told)
    return None if told is None else {what: Expected(*each) for what, each in told.items()}


def _by_reference(
    context: RankContext, batches: _Batches, tolerance: Tolerance
) -> Mapping[str, Expected]:
    local, captures = context.local, context.local.captures
    assert captures is not None
    last = batches.numbers == [captures.last] and captures.rest is not None
    captured = captures.rest if last and captures.rest is not None else captures.whole
    config = local.job.config
    local.rng.epoch = 0
    return expected(
        captured,
        {number: batches.of(number) for number in batches.numbers},
        _replicas(captured, local.interfaces, local.job.plan.replicas, captures.buffers),
        Settings(local.loss, local.rng, config.autocast, scale_of(config).value),
        tolerance,
    )


def _replicas(
    captured: Captured,
    interfaces: Sequence[StageInterface],
    replicas: Sequence[int],
    buffers: Set[str],
) -> dict[str, int]:
    """By the name of a buffer the replicas of the stage that has it."""
    stage_of = {node: face.stage for face in interfaces for node in face.nodes}
    found: dict[str, int] = {}
    for node in captured.module.graph.find_nodes(op="get_attr"):
        owners = (captured.owner.get(user.name) for user in node.users)
        stages = {stage_of[owner] for owner in owners if owner is not None}
        if stages and node.target in buffers:
            found[str(node.target)] = replicas[min(stages)]
    return found


def _has_room(context: RankContext) -> bool:
    """Whether the whole model fits on this rank's device; says so if not."""
    local, captures = context.local, context.local.captures
    assert captures is not None
    values, parameters = captures.whole.values.values(), captures.whole.module.parameters()
    needed = 2 * sum(value.bytes for value in values) + 2 * sum(p.nbytes for p in parameters)
    there = free_memory(local.device)
    if needed > there:
        told = f"{show_bytes(needed)} for the whole model, and {show_bytes(there)} are free"
        print(f"training: not checked against the model: {told}", file=sys.stderr, flush=True)
    return needed <= there


class _Rehearsal:
    """One round through the stages of this rank."""

    def __init__(self, context: RankContext, batches: _Batches) -> None:
        self.context, self.batches = context, batches
        self.losses: dict[str, Tensor] = {}

    def run(self) -> dict[str, Fingerprint]:
        """The figures that this rank has, by name."""
        local, numbers = self.context.local, self.batches.numbers
        local.rng.epoch = 0
        actions = Schedule(_spec(self.context, len(numbers)), len(numbers)).actions(*local.workers)
        numbered = [each._replace(minibatch=numbers[each.minibatch]) for each in actions]
        steppings = {s.stage: _Collected(scale_of(local.job.config)) for s in local.stages}
        executors = {
            stage.stage: self.context.executor(
                stage, Weights(stage.parameters), steppings[stage.stage], self._on_loss
            )
            for stage in local.stages
        }
        with ExitStack() as unchanged:
            for stage in local.stages:
                unchanged.enter_context(_unchanged_buffers(stage))
            stream = ActionStream(TrainingSegment(0, len(numbers)), numbered)
            Engine(executors, self.context.transport).run(stream, self.batches)
            figures = {what: fingerprint(loss) for what, loss in self.losses.items()}
            for stage in local.stages:
                figures |= _figures(stage, steppings[stage.stage])
        return figures

    def _on_loss(self, minibatch: int, loss: Tensor) -> None:
        self.losses[loss_of(minibatch)] = loss


@dataclass
class _Collected:
    """In the place of `Stepping`: an update changes no weights, and its mean gradients stay."""

    scale: Scale
    gradients: Mapping[str, Tensor] = field(default_factory=dict)

    def agree(self, stage: int, weights: Weights, divisor: int) -> None:
        raise AssertionError("there is no norm to agree on")

    def update(self, stage: int, number: int, weights: Weights, divisor: int, updates: int) -> None:
        self.gradients = weights.take_gradients(divisor)
        weights.update({}, lambda: None, number)


def _figures(stage: LocalStage, collected: _Collected) -> dict[str, Fingerprint]:
    """Of the gradients and buffers of a stage, on a mesh of the whole ones."""
    sharding, figures = stage.sharding, {}
    for name, gradient in collected.gradients.items():
        gradient = gradient if sharding is None else sharding.joined(name, gradient)
        figures[gradient_of(name)] = fingerprint(gradient / collected.scale.value)
    for name, buffer in stage.module.named_buffers():
        buffer = buffer if sharding is None else sharding.joined(name, buffer)
        figures[buffer_on(name, stage.replica)] = fingerprint(buffer)
    return figures


@contextmanager
def _unchanged_buffers(stage: LocalStage) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in stage.module.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


def _worst(
    rank: int, wanted: Mapping[str, Expected], figures: Mapping[str, Fingerprint]
) -> tuple[float, str]:
    """How far the figure that is furthest off is, in parts of what is allowed, and the message."""
    worst, told = 0.0, ""
    for what in wanted.keys() & figures.keys():
        most, off = wanted[what].most, apart(wanted[what].fingerprint, figures[what])
        parts = off / most if most else math.inf * off if off else 0.0
        if parts > worst:
            size = wanted[what].fingerprint[0]
            worst, told = parts, difference(what, f"the pipeline (rank {rank})", off, size, most)
    return worst, told


def _agree(context: RankContext, key: str, worst: tuple[float, str]) -> None:
    """Raises UserError on all ranks, for the figure that is furthest off, if one is too far."""
    rank_info, store = context.local.rank_info, context.store
    send_message(store, f"{key}/of/{rank_info.rank}", worst)
    told = None
    if rank_info.rank == 0:
        ranks = range(rank_info.world_size)
        parts, message = max(receive_message(store, f"{key}/of/{rank}") for rank in ranks)
        told = message if parts > 1 else None
    told = broadcast(store, rank_info, f"{key}/agreed", told)
    if told is not None:
        raise UserError(told)

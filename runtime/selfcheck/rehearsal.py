"""The first round of a run, once more and before it: through the pipeline, without an update.

Everything takes part that training has: stages in the form in which they run (autograd, programs,
compiled, devices of a mesh), messages, sums over replicas, random numbers, buffers. Losses,
gradients and buffers have to be those of the captured model in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, replace
from typing import Any, Protocol

from torch import Tensor
from torch._C._distributed_c10d import Store

from pipedream.capture.checks.equivalence import gradient_of, restore
from pipedream.comm.store_messages import broadcast, receive_message, send_message
from pipedream.comm.transport import Transport
from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.graph.errors import UserError
from pipedream.runtime.data.reader import Batch
from pipedream.runtime.engine.engine import Engine
from pipedream.runtime.engine.executor import Executor, Updates
from pipedream.runtime.local.local_model import LocalModel
from pipedream.runtime.local.local_stage import LocalStage
from pipedream.runtime.optim.gradient_sums import GradientSums
from pipedream.runtime.optim.stepping import scale_of
from pipedream.runtime.optim.weights import Weights
from pipedream.runtime.run.action_stream import ActionStream
from pipedream.runtime.run.training_segment import TrainingSegment
from pipedream.runtime.selfcheck.fingerprint import Fingerprint, fingerprint
from pipedream.runtime.selfcheck.reference import (
    Expected,
    Reference,
    Settings,
    buffer_on,
    buffer_replicas,
    has_room,
    loss_of,
    worst_of,
)
from pipedream.runtime.stages.partition import links
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PipelineSpec


class RankAmongOthers(Protocol):
    """What a rehearsal needs of a rank that has met the others."""

    local: LocalModel
    store: Store
    transport: Transport

    def executor(
        self,
        stage: LocalStage,
        weights: Weights,
        stepping: Updates,
        on_loss: Callable[[int, Tensor], None],
    ) -> Executor:
        """What trains a stage of this rank."""

    def say(self, words: str) -> None:
        """Tells those who watch this rank what it does from now on."""


def rehearse(context: RankAmongOthers) -> None:
    """Raises UserError on all ranks if the pipeline does not compute what the model does.

    To be called by all ranks when they have met, and before any has trained.
    """
    local = context.local
    context.say("at the self-check")
    rehearsal = _Rehearsal(context)
    with ExitStack() as unchanged:
        for stage in local.stages:
            unchanged.enter_context(_unchanged_buffers(stage))
        for numbers in _rounds(context):
            batches = _Batches(context, numbers)
            key = f"self-check/{numbers[0]}"
            told = broadcast(context.store, local.rank_info, key, rehearsal.expected(batches))
            if told is None:
                break
            wanted = {what: Expected(*each) for what, each in told.items()}
            worst = worst_of(wanted, rehearsal.run(batches), f"rank {local.rank_info.rank}")
            _agree(context, key, worst)
    local.captures = None


def _rounds(context: RankAmongOthers) -> list[list[int]]:
    """The minibatches of each: one that gives every replica two, whose gradients are added and
    whose messages use the same memory; and the smaller last one.
    """
    local, job = context.local, context.local.job
    sizes, replicas = local.examples.sizes, job.plan.replicas
    most = 2 * max(replicas)
    if job.order != DEFAULT_ORDER:  # all kinds of passes come in so many
        most *= len(replicas)
    if job.policy.drains:
        most = min(most, job.config.microbatches)
    whole = len(sizes) - bool(sizes.rest)
    first = list(range(min(most, whole)))
    return [first, [sizes.last]] if sizes.last is not None else [first]


def _spec(context: RankAmongOthers, minibatches: int) -> PipelineSpec:
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

    def __init__(self, context: RankAmongOthers, numbers: Sequence[int]) -> None:
        self.numbers, local = list(numbers), context.local
        self.examples, self.first, self.device = local.examples, local.first, local.device
        varying, stream = self.examples.config.data.varying, self.examples.stream
        self.epoch = None if varying or stream is not None else self.examples.epoch(1)
        self.read: dict[int, Batch] = {}

    def of(self, number: int) -> Batch:
        """On the CPU."""
        if number not in self.read:
            self.read[number] = self._read(number)
        return self.read[number]

    def _read(self, number: int) -> Batch:
        if self.epoch is not None:
            return self.epoch.batch(number)
        if self.examples.config.data.varying:
            return self.first
        return self.first.first(self.examples.sizes.of(number))

    def inputs(self, minibatch: int, which: Iterable[int]) -> list[Tensor]:
        tensors = self.of(minibatch).to(self.device).inputs
        return [tensors[position] for position in which]

    def target(self, minibatch: int) -> Any:
        return self.of(minibatch).to(self.device).target

    def peek(self, minibatch: int) -> Batch:
        return self.of(minibatch)


class _Rehearsal:
    """Rounds through the stages of this rank. `reference`: on rank 0, if it has room for that."""

    def __init__(self, context: RankAmongOthers) -> None:
        self.context, self.reference = context, _reference(context)

    def expected(self, batches: _Batches) -> dict[str, Any] | None:
        """The figures of a round as JSON can hold them."""
        captures = self.context.local.captures
        if captures is None or self.reference is None:
            return None
        self.context.local.rng.epoch = 0
        rest = captures.rest
        figures = self.reference.round(
            {
                number: (
                    rest if rest is not None and number == captures.last else captures.whole,
                    batches.of(number),
                )
                for number in batches.numbers
            }
        )
        return {what: astuple(each) for what, each in figures.items()}

    def run(self, batches: _Batches) -> dict[str, Fingerprint | None]:
        """The figures that this rank has of a round, by name."""
        local, numbers = self.context.local, batches.numbers
        local.rng.epoch = 0
        actions = Schedule(_spec(self.context, len(numbers)), len(numbers)).actions(*local.workers)
        numbered = [each._replace(minibatch=numbers[each.minibatch]) for each in actions]
        losses: dict[str, Tensor] = {}
        scale = scale_of(local.job.config)
        gradients = {each.stage: GradientSums(scale) for each in local.stages}
        executors = {
            stage.stage: self.context.executor(
                stage,
                Weights(stage.parameters),
                gradients[stage.stage],
                lambda number, loss: losses.update({loss_of(number): loss}),
            )
            for stage in local.stages
        }
        stream = ActionStream(TrainingSegment(0, len(numbers)), numbered)
        Engine(executors, self.context.transport).run(stream, batches)
        figures: dict[str, Fingerprint | None] = {
            what: fingerprint(loss) for what, loss in losses.items()
        }
        for stage in local.stages:
            figures |= _figures(stage, gradients[stage.stage])
        return figures


def _reference(context: RankAmongOthers) -> Reference | None:
    local, captures = context.local, context.local.captures
    if captures is None or captures.tolerance is None or not has_room(captures.whole, local.device):
        return None
    config = local.job.config
    return Reference(
        Settings(local.loss, local.rng, scale_of(config).value),
        buffer_replicas(
            captures.whole, local.interfaces, local.job.plan.replicas, captures.buffers
        ),
        captures.tolerance,
    )


def _figures(stage: LocalStage, gradients: GradientSums) -> dict[str, Fingerprint | None]:
    """Of the gradients and buffers of a stage, on a mesh of the whole ones."""
    sharding, figures = stage.sharding, dict[str, Fingerprint | None]()
    for name, parameter in stage.parameters.items():
        if not parameter.requires_grad:
            continue
        gradient = gradients.gradients.get(name)
        if gradient is not None and sharding is not None:
            gradient = sharding.joined(name, gradient)
        figures[gradient_of(name)] = (
            None if gradient is None else fingerprint(gradient / gradients.scale.value)
        )
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
            restore(buffer, value)


def _agree(context: RankAmongOthers, key: str, worst: tuple[float, str]) -> None:
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
        context.transport.barrier()  # rank 0 has the store, from which all have to hear it first
        raise UserError(told)

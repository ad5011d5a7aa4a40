"""The first round of a run, once more and before it: through the pipeline, without an update.

Everything takes part that training has: stages in the form in which they run (autograd, programs,
compiled, devices of a mesh), messages, sums over replicas, random numbers, buffers. Losses,
gradients and buffers have to be those of the captured model in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, replace
from typing import Any, TypeAlias

from torch import Tensor
from torch._C._distributed_c10d import Store

from pipedream.capture.checks.equivalence import gradient_of
from pipedream.comm.rank_info import RankInfo
from pipedream.comm.store_messages import broadcast, receive_message, send_message
from pipedream.comm.transport import Transport
from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.graph.errors import UserError
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.engine.engine import Engine
from pipedream.runtime.engine.executor import Executor, Updates
from pipedream.runtime.engine.first_passes import do_once, unchanged_buffers
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
    buffer_on,
    loss_of,
    worst_of,
)
from pipedream.runtime.supervise.device_progress import DeviceProgress
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PipelineSpec

ExecutorOf: TypeAlias = Callable[
    [LocalStage, Weights, Updates, Callable[[int, Tensor], None]], Executor
]
"""(stage, weights, updates, what to call with the number and loss of a minibatch)"""


def rehearse(
    local: LocalModel,
    store: Store,
    transport: Transport,
    executor: ExecutorOf,
    progress: DeviceProgress | None = None,
) -> None:
    """Raises UserError on all ranks if the pipeline does not compute what the model does.

    To be called by all ranks when they have met, and before any has trained. `executor` makes what
    trains a stage of this rank.
    """
    reference, rank_info = _reference(local), local.rank_info
    with ExitStack() as unchanged:
        for stage in local.stages:
            unchanged.enter_context(unchanged_buffers(stage.module))
        for numbers in _rounds(local):
            batches = _Batches(local, numbers)
            key = f"self-check/{numbers[0]}"
            figures = broadcast(store, rank_info, key, _expected(reference, local, batches))
            if figures is None:
                break
            expected = {name: Expected(*fields) for name, fields in figures.items()}
            computed = _computed(local, transport, executor, batches, progress)
            worst = worst_of(expected, computed, f"rank {rank_info.rank}")
            _agree(rank_info, store, transport, key, worst)
    local.captures = None


def first_passes(local: LocalModel, executor: ExecutorOf) -> None:
    """Does each pass of this rank once, see `do_once`; `executor` makes what trains a stage of it,
    with messages that are made up.
    """
    rounds = _rounds(local)
    actions = Schedule(_spec(local, len(rounds[0])), len(rounds[0])).actions(*local.workers)
    numbers = [own[0] for own in rounds]
    local.rng.epoch = 0
    with ExitStack() as unchanged:
        for stage in local.stages:
            unchanged.enter_context(unchanged_buffers(stage.module))
        do_once(
            {
                stage.stage: executor(
                    stage, Weights(stage.parameters), GradientSums(), lambda number, loss: None
                )
                for stage in local.stages
            },
            actions,
            numbers,
            _Batches(local, numbers),
        )
    for stage in local.stages:
        stage.step_once()


def _rounds(local: LocalModel) -> list[list[int]]:
    """Returns the minibatches of each: one that gives every replica two, whose gradients are added
    and whose messages use the same memory; and the smaller last one.
    """
    job, sizes, replicas = local.job, local.examples.sizes, local.job.plan.replicas
    most = 2 * max(replicas)
    if job.order != DEFAULT_ORDER:  # all kinds of passes come in so many
        most *= len(replicas)
    if job.policy.drains:
        most = min(most, job.config.microbatches)
    whole = len(sizes) - bool(sizes.rest)
    first = list(range(min(most, whole)))
    return [first, [sizes.last]] if sizes.last is not None else [first]


def _spec(local: LocalModel, minibatches: int) -> PipelineSpec:
    """Returns the pipeline of the run, with one update after so many minibatches."""
    spec = replace(local.spec, joint_norm=False, accumulate=1)
    if local.job.policy.drains:
        return spec
    return replace(spec, name="flush", microbatches=minibatches, max_in_flight=None)


class _Batches:
    """Minibatches of the first epoch, by number; where data are a stream or vary in shape, the
    first one for all.
    """

    def __init__(self, local: LocalModel, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.examples, self.first, self.device = local.examples, local.first, local.device
        varying, stream = self.examples.config.data.varying, self.examples.stream
        self.epoch = None if varying or stream is not None else self.examples.epoch(1)
        self.read: dict[int, Batch] = {}

    def peek(self, minibatch: int) -> Batch:
        """Returns the minibatch on the CPU."""
        if minibatch not in self.read:
            self.read[minibatch] = self._read(minibatch)
        return self.read[minibatch]

    def _read(self, number: int) -> Batch:
        if self.epoch is not None:
            return self.epoch.batch(number)
        if self.examples.config.data.varying:
            return self.first
        return self.first.first(self.examples.sizes.of(number))

    def inputs(self, minibatch: int, which: Iterable[int]) -> list[Tensor]:
        tensors = self.peek(minibatch).to(self.device).inputs
        return [tensors[position] for position in which]

    def target(self, minibatch: int) -> Any:
        return self.peek(minibatch).to(self.device).target


def _reference(local: LocalModel) -> Reference | None:
    """Returns the reference on rank 0, if it has room for that."""
    captures, job = local.captures, local.job
    if captures is None:
        return None
    scale, known = scale_of(job.config).value, (captures.whole, job.plan, captures.buffers)
    compiled = job.compile_backend is not None
    return Reference.of(*known, local.loss, local.rng, captures.tolerance, scale, compiled)


def _expected(
    reference: Reference | None, local: LocalModel, batches: _Batches
) -> dict[str, Any] | None:
    """Returns what the figures of a round should be, as JSON can hold it."""
    captures = local.captures
    if captures is None or reference is None:
        return None
    local.rng.epoch = 0
    model_of = [captures.smaller.get(number, captures.whole) for number in batches.numbers]
    read = map(batches.peek, batches.numbers)
    pairs = zip(model_of, read, strict=True)
    figures = reference.round(dict(zip(batches.numbers, pairs, strict=True)))
    return {name: astuple(figure) for name, figure in figures.items()}


def _computed(
    local: LocalModel,
    transport: Transport,
    executor: ExecutorOf,
    batches: _Batches,
    progress: DeviceProgress | None,
) -> dict[str, Fingerprint | None]:
    """Sends a round through the stages; returns the figures that this rank has of it, by name."""
    numbers, scale = batches.numbers, scale_of(local.job.config)
    local.rng.epoch = 0
    actions = Schedule(_spec(local, len(numbers)), len(numbers)).actions(*local.workers)
    numbered = [action._replace(minibatch=numbers[action.minibatch]) for action in actions]
    losses: dict[int, Tensor] = {}
    sums = {stage.stage: GradientSums(scale) for stage in local.stages}
    executors = {
        stage.stage: executor(
            stage, Weights(stage.parameters), sums[stage.stage], losses.__setitem__
        )
        for stage in local.stages
    }
    stream = ActionStream(TrainingSegment(0, len(numbers)), numbered)
    Engine(executors, transport, progress=progress).run(stream, batches)
    figures: dict[str, Fingerprint | None] = {
        loss_of(number): fingerprint(loss) for number, loss in losses.items()
    }
    for stage in local.stages:
        figures |= _figures(stage, sums[stage.stage])
    return figures


def _figures(stage: LocalStage, gradients: GradientSums) -> dict[str, Fingerprint | None]:
    """Returns those of the gradients and buffers of a stage, on a mesh of the whole ones."""
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


def _agree(
    rank_info: RankInfo, store: Store, transport: Transport, key: str, worst: tuple[float, str]
) -> None:
    """Raises UserError on all ranks, for the figure that is furthest off, if one is too far."""
    send_message(store, f"{key}/of/{rank_info.rank}", worst)
    parts, message = 0.0, ""
    if rank_info.rank == 0:
        ranks = range(rank_info.world_size)
        parts, message = max(receive_message(store, f"{key}/of/{rank}") for rank in ranks)
    problem = broadcast(store, rank_info, f"{key}/agreed", message if parts > 1 else None)
    if problem is not None:
        transport.barrier()  # rank 0 has the store, from which all have to hear it first
        raise UserError(problem)

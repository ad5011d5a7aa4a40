"""The epochs of a run on one rank, each trained segment by segment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from pipedream.capture.precision import lowered
from pipedream.comm.store_messages import broadcast
from pipedream.graph.timeline import Event
from pipedream.runtime.checkpoint.savepoint import save
from pipedream.runtime.data.reader import Reader
from pipedream.runtime.engine.action_stream import ActionStream
from pipedream.runtime.engine.engine import Engine
from pipedream.runtime.engine.executor import Executor
from pipedream.runtime.engine.held_out import try_held_out
from pipedream.runtime.engine.training_segment import (
    Position,
    TrainingSegment,
    shifted,
    training_segments,
)
from pipedream.runtime.optim.staleness import delays
from pipedream.runtime.rank_context import RankContext
from pipedream.runtime.report.summary import Losses
from pipedream.runtime.supervise.status import Status, current_status, publishing_status
from pipedream.schedule.action import ENDS_BACKWARD, Action, Kind


def train_epochs(context: RankContext) -> Position | None:
    """Trains from the member's `first` on; where the run has stopped, if it was asked to.

    Raises UserError and PeerLost as the engine does.
    """
    local, first, stopped = context.local, context.first, None
    if first.minibatch == 0:
        _try_if_due(context, first.epoch)  # a run may have ended between the checkpoint and this
    for epoch in range(first.epoch, local.job.epochs):
        begin = first.minibatch if epoch == first.epoch else 0
        ahead = list(training_segments(local.examples.minibatches, local.every, begin))
        stopped = _Training(context, epoch, ahead).run()
        if stopped is not None:
            break
        if epoch + 1 == local.job.epochs:
            context.graceful_stop.end()
        _try_if_due(context, epoch + 1)
    context.graceful_stop.end()
    context.saver.end()
    if stopped is not None:
        _leave_together(context)
    return stopped


def _leave_together(context: RankContext) -> None:
    """Once rank 0 has saved: mpirun ends all when one leaves with another code than 0."""
    broadcast(context.store, context.local.place, "saved", True)  # however long it takes
    context.transport.barrier()  # until then rank 0 keeps the store


def _try_if_due(context: RankContext, done: int) -> None:
    """The held-out data, after so many epochs."""
    job, trial = context.local.job, context.local.trial
    if trial is None or done == 0:
        return
    every = job.config.evaluate_every or 1
    if done % every == 0 or done == job.epochs:
        try_held_out(context, trial, done)


class _Training:
    """One epoch, or what is left of it: the segments that are `ahead`."""

    def __init__(self, context: RankContext, epoch: int, ahead: Sequence[TrainingSegment]) -> None:
        self.context, self.local, self.ahead = context, context.local, ahead
        self.number = self.local.rng.epoch = epoch + 1
        self.losses = Losses(
            context.store,
            self.number,
            self.local.examples.minibatches,
            ahead[0].begin,
            self.local.job.config.nan == "stop",
        )
        self.under_way: Action | None = None
        self.in_flight = 0
        self.events: list[Event] = []

    def run(self) -> Position | None:
        """Where the run has stopped, if it was asked to."""
        context, local, display = self.context, self.local, self.context.display
        self.begin = time.perf_counter()
        context.recorder.begin()
        shown = nullcontext() if display is None else display.watching(self.losses)
        told = publishing_status(context.store, local.place.rank, self._status)
        minibatches = local.examples.epoch(self.number)
        with shown, told, Reader(minibatches, self._to_read()) as data:
            stopped = self._run_segments(self._engine(), data)
            self.losses.end()
        context.recorder.add(self.number, self.events, local.examples.minibatches)
        context.transport.barrier()
        if display is not None:
            display.end_epoch(self.losses)
        return stopped

    def _run_segments(self, engine: Engine, data: Reader) -> Position | None:
        context, epoch = self.context, self.number - 1
        for segment in self.ahead:
            stream = context.graceful_stop.begin_segment(epoch, segment, self._stream)
            if stream is None:
                return Position(epoch, segment.begin)
            context.memory.begin()
            engine.run(stream, data)
            context.memory.end()  # before a checkpoint's copy of the weights: not the plan's
            context.stepping.end_segment()
            self.under_way = None
            end = position = Position(epoch, stream.segment.end)
            if end.minibatch == self.local.examples.minibatches:
                context.stepping.end_epoch(end.minibatch)
                position = Position(epoch + 1)
            save(context, position)
            if context.graceful_stop.stops_at(end, position) and position < Position(
                self.local.job.epochs
            ):
                return position
        return None

    def _stream(self, segment: TrainingSegment) -> ActionStream:
        actions = shifted(self.local.actions(len(segment)), segment.begin)
        predicts = self.context.weights.prediction is not None
        return ActionStream(segment, actions, self._delays(segment) if predicts else {})

    def _engine(self) -> Engine:
        """Not kept here: it knows this object, and in a circle both would outlive the epoch."""
        context, local = self.context, self.local
        executor = Executor(
            stage_modules=local.stage_modules,
            weights=context.weights,
            stepping=context.stepping,
            transport=context.transport,
            groups=context.groups,
            ranks=local.job.plan.process_ranks,
            loss=self._loss,
            on_loss=self._tell,
            rng=local.rng,
            per_update=self._per_update(),
            recompute=local.job.plan.stages[local.stage].recompute,
        )
        return Engine(
            {local.stage: executor}, context.transport, self._after, self._before, self.events
        )

    def _delays(self, segment: TrainingSegment) -> dict[int, int]:
        """Of each minibatch: by how many updates its weights will be old."""
        found = delays(self.local.schedule(len(segment)), self.local.stage)
        return {minibatch + segment.begin: delay for minibatch, delay in found.items()}

    def _per_update(self) -> int:
        """Minibatches that count as one update: of a stage of one replica, if it is by itself."""
        job = self.local.job
        return job.config.microbatches if job.policy.same_everywhere else job.config.accumulate

    def _to_read(self) -> list[int]:
        """The minibatches whose inputs or targets this rank needs."""
        if not self.local.layout.reads and self.local.stage < len(self.local.layouts) - 1:
            return []
        return [
            action.minibatch + segment.begin
            for segment in self.ahead
            for action in self.local.actions(len(segment))
            if action.kind is Kind.FORWARD
        ]

    def _loss(self, output: Any, target: Any) -> torch.Tensor:
        with lowered(self.local.job.config.autocast, self.local.device):
            return self.local.loss(output, target)

    def _tell(self, minibatch: int, loss: torch.Tensor) -> None:
        self.losses.tell(minibatch, loss)
        self.context.stepping.note(loss)

    def _before(self, action: Action) -> None:
        self.under_way = action
        if action.kind is Kind.FORWARD:
            self.in_flight += 1
            self.context.peak_in_flight = max(self.context.peak_in_flight, self.in_flight)
        self.context.say(f"in epoch {self.number} at {action}, minibatch {action.minibatch}")

    def _after(self, action: Action) -> None:
        if action.kind in ENDS_BACKWARD:
            self.in_flight -= 1
        self.context.recorder.thin_out(self.events)

    def _status(self) -> Status:
        ranks = self.local.job.plan.process_ranks
        now, memory = time.perf_counter(), self.context.memory.now()
        return current_status(self.events, self.under_way, ranks, self.begin, now, memory)

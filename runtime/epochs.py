"""The epochs of a run on one rank, each trained segment by segment."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from pipedream.comm.store_messages import broadcast
from pipedream.runtime.data.reader import Reader
from pipedream.runtime.engine.action_times import ActionTimes
from pipedream.runtime.engine.engine import Engine, minibatches_read
from pipedream.runtime.first_look import first_look
from pipedream.runtime.held_out import evaluate_if_due
from pipedream.runtime.rank_context import RankContext
from pipedream.runtime.report.first_minibatches import RankReport
from pipedream.runtime.report.summary import Losses
from pipedream.runtime.run.action_stream import ActionStream, Lateness
from pipedream.runtime.run.training_segment import Position, TrainingSegment, training_segments
from pipedream.runtime.supervise.status import Status, current_status, publishing_status
from pipedream.schedule.action import ENDS_BACKWARD, Action, Kind


def train_epochs(context: RankContext) -> Position | None:
    """Trains from the context's `first` on. Returns where the run has stopped, if it was asked to,
    or changes its plan.

    Raises UserError and PeerLost as the engine does.
    """
    local, first, stopped = context.local, context.first, None
    if first.minibatch == 0:
        # A run may have ended between the checkpoint and this.
        evaluate_if_due(context, first.epoch)
    for epoch in range(first.epoch, local.job.epochs):
        begin = first.minibatch if epoch == first.epoch else 0
        minibatches, most = local.examples.minibatches, local.job.segment_minibatches
        ahead = list(training_segments(minibatches, most, begin))
        report = first_look(context, epoch, ahead) if epoch == first.epoch else None
        stopped = _Training(context, epoch, ahead, report).run()
        if stopped is not None:
            break
        if epoch + 1 == local.job.epochs:
            context.graceful_stop.end()
        evaluate_if_due(context, epoch + 1)
    context.graceful_stop.end()
    if context.retuner is not None:
        context.retuner.end()
    context.saver.end()
    if stopped is not None:
        # Until rank 0 has saved: mpirun ends all ranks once one exits with a non-zero code.
        broadcast(context.store, local.rank_info, "saved", True)  # however long it takes
        context.transport.barrier()  # until then rank 0 keeps the store
    return stopped


class _Training:
    """One epoch, or the segments of it that are `ahead`."""

    def __init__(
        self,
        context: RankContext,
        epoch: int,
        ahead: Sequence[TrainingSegment],
        report: RankReport | None,
    ) -> None:
        """`report`: of the first minibatches, if they are these."""
        self.context, self.local, self.ahead = context, context.local, ahead
        self.report = report
        self.number = self.local.rng.epoch = epoch + 1
        self.losses = Losses(
            context.store,
            self.number,
            self.local.examples.minibatches,
            ahead[0].begin,
            self.local.job.config.nan == "stop",
            self.local.device,
        )
        self.under_way: Action | None = None
        self.in_flight = Counter[int]()
        self.times = ActionTimes.on(self.local.device)

    def run(self) -> Position | None:
        """Returns where the run has stopped, if it was asked to."""
        context, local, display = self.context, self.local, self.context.display
        self.begin = time.perf_counter()
        context.recorder.begin()
        shown = nullcontext() if display is None else display.watching(self.losses)
        publishing = publishing_status(
            context.store, local.rank_info.rank, self._status, local.device
        )
        minibatches = local.examples.epoch(self.number)
        with (
            shown,
            publishing,
            Reader(minibatches, self._to_read(), self._reads_targets_only) as data,
        ):
            stopped = self._run_segments(self._engine(), data)
            if self.report is not None:
                self.report.look(self.times.events, ended=True)
            self.losses.end()
        context.recorder.add(self.number, self.times.events, local.examples.minibatches)
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
            context.save(position)
            stops = context.graceful_stop.stops_at(end, position)
            stops = (stops and position < Position(self.local.job.epochs)) or context.changes_plan
            if stops:
                return position
        return None

    def _stream(self, segment: TrainingSegment) -> ActionStream:
        actions, begin = self.local.actions(len(segment)), segment.begin
        if begin:
            actions = [each._replace(minibatch=each.minibatch + begin) for each in actions]
        return ActionStream(segment, actions, self._lateness(segment))

    def _engine(self) -> Engine:
        """Makes the engine. As an attribute it would outlive the epoch, in a reference cycle."""
        context = self.context
        executors = {
            stage.stage: context.executor(
                stage, context.weights[stage.stage], context.stepping, self._on_loss
            )
            for stage in self.local.stages
        }
        transport = context.transport
        return Engine(executors, transport, self._after, self._before, self.times, context.progress)

    def _lateness(self, segment: TrainingSegment) -> Lateness:
        """Returns what the corrections of its weights have to know of the segment."""
        stage, *_ = self.local.stages
        weights = self.context.weights[stage.stage]
        if weights.prediction is None and weights.feedback is None:
            return Lateness()
        schedule = self.local.schedule(len(segment))
        if weights.prediction is None:
            return Lateness(makes_good=schedule.makes_good(stage.stage))
        delays = schedule.delays(stage.stage)
        return Lateness({number + segment.begin: delay for number, delay in delays.items()})

    def _to_read(self) -> list[int]:
        """Returns the minibatches whose inputs or targets this rank needs."""
        own, stages = [stage.interface for stage in self.local.stages], len(self.local.interfaces)
        varying = self.local.job.config.data.varying
        return [
            minibatch + segment.begin
            for segment in self.ahead
            for minibatch in minibatches_read(
                self.local.actions(len(segment)), own, stages, varying
            )
        ]

    @property
    def _reads_targets_only(self) -> bool:
        """Whether no stage of this rank reads an input of the model."""
        varying = self.local.job.config.data.varying
        return not varying and not any(stage.interface.reads for stage in self.local.stages)

    def _on_loss(self, minibatch: int, loss: torch.Tensor) -> None:
        self.losses.send(minibatch, loss)
        self.context.stepping.note(loss)

    def _before(self, action: Action) -> None:
        self.under_way = action
        if action.kind is Kind.FORWARD:
            stage, peak = action.stage, self.context.peak_in_flight
            self.in_flight[stage] += 1
            peak[stage] = max(peak[stage], self.in_flight[stage])
        self.context.say(f"in epoch {self.number} at {action}, minibatch {action.minibatch}")

    def _after(self, action: Action) -> None:
        if action.kind in ENDS_BACKWARD:
            self.in_flight[action.stage] -= 1
        self.context.recorder.thin_out(self.times.events)

    def _status(self) -> Status:
        now, memory = time.perf_counter(), self.context.memory.now()
        assignment = self.local.job.plan.rank_assignment
        under_way = self.times.under_way(self.under_way)
        if self.report is not None:
            self.report.look(self.times.events)
        return current_status(self.times.events, under_way, assignment, self.begin, now, memory)

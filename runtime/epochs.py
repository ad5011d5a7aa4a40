"""The epochs of a run on one rank, each trained leg by leg."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from pipedream.capture.precision import lowered
from pipedream.comm.store_messages import from_first
from pipedream.graph.timeline import Event
from pipedream.runtime.checkpoint.savepoint import save
from pipedream.runtime.data.reader import Reader
from pipedream.runtime.engine.action_stream import Course
from pipedream.runtime.engine.engine import Engine
from pipedream.runtime.engine.executor import Executor
from pipedream.runtime.engine.held_out import try_held_out
from pipedream.runtime.engine.training_segment import Leg, Position, legs, shifted
from pipedream.runtime.optim.staleness import delays
from pipedream.runtime.rank_context import Member
from pipedream.runtime.report.summary import Losses
from pipedream.runtime.supervise.status import Status, look, telling
from pipedream.schedule.action import ENDS_BACKWARD, Action, Kind


def train_epochs(member: Member) -> Position | None:
    """Trains from the member's `first` on; where the run has stopped, if it was asked to.

    Raises UserError and PeerLost as the engine does.
    """
    rank, first, stopped = member.rank, member.first, None
    if first.minibatch == 0:
        _try_if_due(member, first.epoch)  # a run may have ended between the checkpoint and this
    for epoch in range(first.epoch, rank.job.epochs):
        begin = first.minibatch if epoch == first.epoch else 0
        ahead = list(legs(rank.examples.minibatches, rank.every, begin))
        stopped = _Training(member, epoch, ahead).run()
        if stopped is not None:
            break
        if epoch + 1 == rank.job.epochs:
            member.halt.end()
        _try_if_due(member, epoch + 1)
    member.halt.end()
    member.saver.end()
    if stopped is not None:
        _leave_together(member)
    return stopped


def _leave_together(member: Member) -> None:
    """Once rank 0 has saved: mpirun ends all when one leaves with another code than 0."""
    from_first(member.store, member.rank.place, "saved", True)  # however long it takes
    member.transport.barrier()  # until then rank 0 keeps the store


def _try_if_due(member: Member, done: int) -> None:
    """The held-out data, after so many epochs."""
    job, trial = member.rank.job, member.rank.trial
    if trial is None or done == 0:
        return
    every = job.config.evaluate_every or 1
    if done % every == 0 or done == job.epochs:
        try_held_out(member, trial, done)


class _Training:
    """One epoch, or what is left of it: the legs that are `ahead`."""

    def __init__(self, member: Member, epoch: int, ahead: Sequence[Leg]) -> None:
        self.member, self.rank, self.ahead = member, member.rank, ahead
        self.number = self.rank.dice.epoch = epoch + 1
        self.losses = Losses(
            member.store,
            self.number,
            self.rank.examples.minibatches,
            ahead[0].begin,
            self.rank.job.config.nan == "stop",
        )
        self.under_way: Action | None = None
        self.in_flight = 0
        self.events: list[Event] = []

    def run(self) -> Position | None:
        """Where the run has stopped, if it was asked to."""
        member, rank, display = self.member, self.rank, self.member.display
        self.begin = time.perf_counter()
        member.recorder.begin()
        shown = nullcontext() if display is None else display.watching(self.losses)
        told = telling(member.store, rank.place.rank, self._status)
        minibatches = rank.examples.epoch(self.number)
        with shown, told, Reader(minibatches, self._to_read()) as data:
            stopped = self._run_legs(self._engine(), data)
            self.losses.end()
        member.recorder.add(self.number, self.events, rank.examples.minibatches)
        member.transport.barrier()
        if display is not None:
            display.end_epoch(self.losses)
        return stopped

    def _run_legs(self, engine: Engine, data: Reader) -> Position | None:
        member, epoch = self.member, self.number - 1
        for leg in self.ahead:
            course = member.halt.depart(epoch, leg, self._course)
            if course is None:
                return Position(epoch, leg.begin)
            member.memory.begin()
            engine.run(course, data)
            member.memory.end()  # before a checkpoint's copy of the weights: not the plan's
            member.stepping.end_leg()
            self.under_way = None
            end = position = Position(epoch, course.leg.end)
            if end.minibatch == self.rank.examples.minibatches:
                member.stepping.end_epoch(end.minibatch)
                position = Position(epoch + 1)
            save(member, position)
            if member.halt.rests(end, position) and position < Position(self.rank.job.epochs):
                return position
        return None

    def _course(self, leg: Leg) -> Course:
        actions = shifted(self.rank.actions(len(leg)), leg.begin)
        predicts = self.member.weights.prediction is not None
        return Course(leg, actions, self._delays(leg) if predicts else {})

    def _engine(self) -> Engine:
        """Not kept here: it knows this object, and in a circle both would outlive the epoch."""
        member, rank = self.member, self.rank
        executor = Executor(
            forms=rank.forms,
            weights=member.weights,
            stepping=member.stepping,
            transport=member.transport,
            groups=member.groups,
            ranks=rank.job.plan.process_ranks,
            loss=self._loss,
            on_loss=self._tell,
            dice=rank.dice,
            per_update=self._per_update(),
            recompute=rank.job.plan.stages[rank.stage].recompute,
        )
        return Engine(
            {rank.stage: executor}, member.transport, self._after, self._before, self.events
        )

    def _delays(self, leg: Leg) -> dict[int, int]:
        """Of each minibatch: by how many updates its weights will be old."""
        found = delays(self.rank.schedule(len(leg)), self.rank.stage)
        return {minibatch + leg.begin: delay for minibatch, delay in found.items()}

    def _per_update(self) -> int:
        """Minibatches that count as one update: of a stage of one replica, if it is by itself."""
        job = self.rank.job
        return job.config.microbatches if job.policy.same_everywhere else job.config.accumulate

    def _to_read(self) -> list[int]:
        """The minibatches whose inputs or targets this rank needs."""
        if not self.rank.layout.reads and self.rank.stage < len(self.rank.layouts) - 1:
            return []
        return [
            action.minibatch + leg.begin
            for leg in self.ahead
            for action in self.rank.actions(len(leg))
            if action.kind is Kind.FORWARD
        ]

    def _loss(self, output: Any, target: Any) -> torch.Tensor:
        with lowered(self.rank.job.config.autocast, self.rank.device):
            return self.rank.loss(output, target)

    def _tell(self, minibatch: int, loss: torch.Tensor) -> None:
        self.losses.tell(minibatch, loss)
        self.member.stepping.note(loss)

    def _before(self, action: Action) -> None:
        self.under_way = action
        if action.kind is Kind.FORWARD:
            self.in_flight += 1
            self.member.peak_in_flight = max(self.member.peak_in_flight, self.in_flight)
        self.member.say(f"in epoch {self.number} at {action}, minibatch {action.minibatch}")

    def _after(self, action: Action) -> None:
        if action.kind in ENDS_BACKWARD:
            self.in_flight -= 1
        self.member.recorder.thin_out(self.events)

    def _status(self) -> Status:
        ranks = self.rank.job.plan.process_ranks
        now, memory = time.perf_counter(), self.member.memory.now()
        return look(self.events, self.under_way, ranks, self.begin, now, memory)

"""The epochs of a run on one rank, each trained leg by leg."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from pipedream.profiler.precision import lowered
from pipedream.runtime.data import Reader
from pipedream.runtime.delay import delays
from pipedream.runtime.engine import Engine
from pipedream.runtime.held_out import try_held_out
from pipedream.runtime.legs import Leg, Position, legs, shifted
from pipedream.runtime.live import Status, look, telling
from pipedream.runtime.member import Member
from pipedream.runtime.report import Losses
from pipedream.runtime.savepoint import save
from pipedream.runtime.schedule import Action, Kind


def train_epochs(member: Member) -> Position | None:
    """Trains from the member's `first` on; where the run has stopped, if it was asked to.

    Raises UserError and PeerLost as the engine does.
    """
    rank, first = member.rank, member.first
    job, trial, stopped = rank.job, rank.trial, None
    for epoch in range(first.epoch, job.epochs):
        begin = first.minibatch if epoch == first.epoch else 0
        ahead = list(legs(rank.examples.minibatches, rank.every, begin))
        stopped = _Training(member, epoch, ahead).run()
        if stopped is not None:
            break
        done, every = epoch + 1, job.config.evaluate_every or 1
        if trial is not None and (done % every == 0 or done == job.epochs):
            try_held_out(member, trial, done)
    member.saver.end()
    return stopped


class _Training:
    """One epoch, or what is left of it: the legs that are `ahead`."""

    def __init__(self, member: Member, epoch: int, ahead: Sequence[Leg]) -> None:
        self.member, self.rank = member, member.rank
        self.number = self.rank.dice.epoch = epoch + 1
        self.schedules = {leg: self.rank.schedule(len(leg)) for leg in ahead}
        self.to_do = {
            leg: shifted(found.actions(self.rank.worker), leg.begin)
            for leg, found in self.schedules.items()
        }
        self.actions = [action for actions in self.to_do.values() for action in actions]
        self.losses = Losses(
            member.store,
            self.number,
            self.rank.examples.minibatches,
            ahead[0].begin,
            self.rank.job.config.nan == "stop",
        )
        self.ends: list[float] = []
        self.engine = self._engine()

    def run(self) -> Position | None:
        """Where the run has stopped, if it was asked to."""
        member, rank, display = self.member, self.rank, self.member.display
        self.begin = time.perf_counter()
        shown = nullcontext() if display is None else display.watching(self.losses)
        told = telling(member.store, rank.place.rank, self._status)
        minibatches = rank.examples.epoch(self.number)
        with shown, told, Reader(minibatches, self._to_read()) as data:
            stopped = self._run_legs(data)
            self.losses.end()
        member.times.append((time.perf_counter() - self.begin, self.ends))
        member.recorder.add(self.number, self.engine.events)
        member.transport.barrier()
        if display is not None:
            display.end_epoch(self.losses)
        return stopped

    def _run_legs(self, data: Reader) -> Position | None:
        member, last = self.member, self.rank.examples.minibatches
        for leg, actions in self.to_do.items():
            member.memory.begin()
            self.engine.run(actions, data)
            member.memory.end()  # before a checkpoint's copy of the weights: not the plan's
            if leg.end < last:
                position = Position(self.number - 1, leg.end)
            else:
                member.stepping.end_epoch()
                position = Position(self.number)
            if save(member, position):
                return position
        return None

    def _engine(self) -> Engine:
        member, rank = self.member, self.rank
        return Engine(
            forms=rank.forms,
            weights=member.weights,
            stepping=member.stepping,
            transport=member.transport,
            groups=member.groups,
            ranks=rank.job.plan.process_ranks,
            loss=self._loss,
            on_loss=self.losses.tell,
            before=self._before,
            after=self._after,
            dice=rank.dice,
            per_update=self._per_update(),
            recompute=rank.job.plan.stages[rank.stage].recompute,
            ahead=self._delays() if member.weights.prediction is not None else {},
        )

    def _delays(self) -> dict[int, int]:
        """Of each minibatch: by how many updates its weights will be old."""
        return {
            minibatch + leg.begin: delay
            for leg, found in self.schedules.items()
            for minibatch, delay in delays(found, self.rank.stage).items()
        }

    def _per_update(self) -> int:
        """Minibatches that count as one update: of a stage of one replica, if it is by itself."""
        job = self.rank.job
        return job.config.microbatches if job.policy.same_everywhere else job.config.accumulate

    def _to_read(self) -> list[int]:
        """The minibatches whose inputs or targets this rank needs."""
        if not self.rank.layout.reads and self.rank.stage < len(self.rank.layouts) - 1:
            return []
        return [action.minibatch for action in self.actions if action.kind is Kind.FORWARD]

    def _loss(self, output: Any, target: Any) -> torch.Tensor:
        with lowered(self.rank.job.config.autocast, self.rank.device):
            return self.rank.loss(output, target)

    def _before(self, action: Action) -> None:
        if self.member.pulse is not None:
            words = f"in epoch {self.number} at {action}, minibatch {action.minibatch}"
            self.member.pulse.say(self.rank.place.rank, words)

    def _after(self, action: Action) -> None:
        if action.kind is Kind.BACKWARD:
            self.ends.append(time.perf_counter())

    def _status(self) -> Status:
        events, ranks = self.engine.events, self.rank.job.plan.process_ranks
        now = time.perf_counter()
        return look(events, self.actions, ranks, self.begin, now, self.member.memory.now())

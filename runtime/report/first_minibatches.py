"""A look at a run after its first hundred minibatches: each rank reports, rank 0 compares.

The reports go through the store from the thread that publishes the status of a rank, so that no
pass waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from pipedream.comm.store_messages import receive_message, send_message
from pipedream.graph.measured_run import MeasuredRank, MeasuredRun
from pipedream.graph.timeline import Event
from pipedream.graph.units import show_seconds
from pipedream.runtime.report.stage_seconds import (
    StagesMeasured,
    WorkerSeconds,
    worker_seconds,
)
from pipedream.runtime.report.utilisation import measured_rank
from pipedream.runtime.report.where_time_is import where_time_is
from pipedream.runtime.run.job import Job
from pipedream.runtime.run.training_segment import TrainingSegment, whole_updates
from pipedream.schedule.action import ENDS_BACKWARD, Worker
from pipedream.schedule.steady_state import SteadySpan

MINIBATCHES = 100
"""How many are looked at; of a short run a tenth."""

FEWEST = 10
"""Fewer minibatches on a rank give no reliable median."""


def span_of(job: Job, segment: TrainingSegment, whole: int, left: int) -> SteadySpan | None:
    """Returns the first minibatches of a run to look at, which begins with this segment: the
    pipeline is full, and all updates of them are whole. None if the segment is too short.

    `whole`: the minibatches of an epoch that have all their examples; `left`: how many the run has
    yet to do, `segment` among them.
    """
    policy, unit = job.policy, whole_updates(1, job.policy)
    fill = 1 if policy.drains else policy.in_flight(0) * policy.spec.replicas[0]
    first = segment.begin + ceil(fill / unit) * unit
    wanted = max(min(MINIBATCHES, left // 10), FEWEST * max(policy.spec.replicas))
    last = min(segment.end, whole) - (0 if policy.drains else fill)
    count = min(ceil(wanted / unit) * unit, (last - first) // unit * unit)
    if count < FEWEST * max(policy.spec.replicas):
        return None
    return SteadySpan(segment.end, first, first + count)


@dataclass
class RankReport:
    """What a rank sends of the minibatches of `span`, once, when it has done them."""

    store: Store
    rank: int
    workers: Sequence[Worker]
    replicas: Sequence[int]
    span: SteadySpan
    sent: bool = False

    def look(self, events: Sequence[Event], ended: bool = False) -> None:
        """Sends the report if the `events` so far have all of it, that is some of later minibatches
        too, or have `ended`; then None if there is too little to tell.
        """
        if self.sent or not events:
            return
        newest = [e.action.minibatch for e in events[-64:] if e.action.kind in ENDS_BACKWARD]
        if not ended and max(newest, default=0) < self.span.last:
            return
        known = list(events)  # the engine goes on
        reports = [self._report(known, worker) for worker in self.workers]
        if ended or all(reports):
            self.sent = True
            send_message(self.store, _key(self.rank), reports if all(reports) else None)

    def _report(self, events: Sequence[Event], worker: Worker) -> dict[str, Any] | None:
        counted = range(self.span.first, self.span.last)
        rank = measured_rank([events], counted, self.rank, worker)
        seconds = worker_seconds(events, worker, self.replicas[worker[0]], self.span)
        if rank is None or seconds is None:
            return None
        return {"rank": rank.model_dump(mode="json"), "seconds": asdict(seconds)}


@dataclass(frozen=True)
class FirstMinibatches:
    """What all ranks have reported of so many minibatches."""

    count: int
    stages: StagesMeasured
    ranks: tuple[MeasuredRank, ...]

    def lines(self, job: Job) -> list[str]:
        """Returns the block that rank 0 prints."""
        seconds, predicted = self.stages.seconds, job.plan.predicted
        text = f"after {self.count} minibatches: {show_seconds(seconds)} a minibatch"
        if not job.is_comparable:
            return [text, *where_time_is(None, self.stages)]
        verdict = "as expected" if predicted.expects(seconds) else "expected"
        said = predicted.words_for_a_run
        return [f"{text}, {verdict}: {said}", *where_time_is(predicted, self.stages)]

    def run(self, job: Job) -> MeasuredRun:
        """Returns the same as measured.json has it."""
        return MeasuredRun(
            device=job.device,
            threads=torch.get_num_threads(),
            batch_size=job.config.batch_size,
            schedule=job.schedule,
            seconds_per_minibatch=self.stages.seconds,
            ranks=self.ranks,
            plan=job.plan,
        )


@dataclass
class FirstLook:
    """Rank 0's part: it waits for the reports of all ranks, and has them once."""

    store: Store
    ranks: Sequence[int]
    span: SteadySpan
    had: bool = False

    def received(self) -> FirstMinibatches | None:
        """Returns what all ranks have sent; None before that, afterwards, and if one of them had
        too little to tell.
        """
        if self.had or not self.store.check([_key(rank) for rank in self.ranks]):
            return None
        self.had = True
        messages = [receive_message(self.store, _key(rank)) for rank in self.ranks]
        if None in messages:
            return None
        reports = [report for message in messages for report in message]
        workers = [_worker(report["seconds"]) for report in reports]
        ranks = tuple(MeasuredRank.model_validate(report["rank"]) for report in reports)
        return FirstMinibatches(len(self.span), StagesMeasured.of(workers), ranks)


def _worker(fields: Mapping[str, Any]) -> WorkerSeconds:
    waits = {int(stage): seconds for stage, seconds in fields["waits"].items()}
    return WorkerSeconds(**{**fields, "waits": waits})


def _key(rank: int) -> str:
    return f"first-minibatches/{rank}"

"""What the workers of each stage do in the time of a minibatch, and whom they wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from pipedream.graph.plan import Plan, StageSeconds, workers_by_rank
from pipedream.graph.timeline import Event, Timeline
from pipedream.schedule.action import ENDS_BACKWARD, EXCHANGES, RECEIVES, StageLink, Worker
from pipedream.schedule.steady_state import BUSY, SteadySpan


@dataclass(frozen=True)
class WorkerSeconds:
    """Of one worker, per minibatch of the pipeline: `whole`, and what it was spent on; `waits`: for
    messages, by the stage that they come from.
    """

    stage: int
    whole: float
    compute: float
    exchange: float
    waits: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StagesMeasured:
    """`seconds` per minibatch of the pipeline; those of each stage, in the mean over its workers;
    and of `waits` by (stage that waits, stage that it waits for).
    """

    seconds: float
    stages: tuple[StageSeconds, ...]
    waits: Mapping[StageLink, float]

    @staticmethod
    def of(workers: Sequence[WorkerSeconds]) -> StagesMeasured:
        """Takes them together: the pipeline is as slow as the stage that takes longest."""
        by_stage: dict[int, list[WorkerSeconds]] = defaultdict(list)
        for worker in workers:
            by_stage[worker.stage].append(worker)
        waits: dict[StageLink, float] = defaultdict(float)
        for stage, own in by_stage.items():
            for worker in own:
                for other, seconds in worker.waits.items():
                    waits[stage, other] += seconds / len(own)
        stages = tuple(
            StageSeconds(
                compute=fmean(worker.compute for worker in own),
                exchange=fmean(worker.exchange for worker in own),
                waiting=fmean(sum(worker.waits.values()) for worker in own),
            )
            for _, own in sorted(by_stage.items())
        )
        seconds = max(fmean(worker.whole for worker in own) for own in by_stage.values())
        return StagesMeasured(seconds, stages, dict(waits))


def worker_seconds(
    events: Iterable[Event], worker: Worker, replicas: int, span: SteadySpan
) -> WorkerSeconds | None:
    """Returns what a worker did from when it had run its backward passes before minibatch
    `span.first` to when it had run those before `span.last`; None if these are not all known.
    """
    stage, replica = worker
    own = [event for event in events if event.action.stage == stage]
    ends = {e.action.minibatch: e.end for e in own if e.action.kind in ENDS_BACKWARD}
    wanted = [b for b in range(span.first, span.last) if b % replicas == replica]
    before = [minibatch for minibatch in ends if minibatch < span.first]
    if not wanted or not before or not ends.keys() >= set(wanted):
        return None
    first, last = ends[max(before)], ends[wanted[-1]]
    # A worker of several replicas passes each so many: the window has that many of the pipeline's.
    minibatches = wanted[-1] - max(before)
    spent: dict[str, float] = defaultdict(float)
    waits: dict[int, float] = defaultdict(float)
    for event in own:
        seconds = (min(event.end, last) - max(event.begin, first)) / minibatches
        if seconds <= 0:
            continue
        spent[event.action.kind] += seconds
        if event.action.kind in RECEIVES and event.action.peer is not None:
            waits[event.action.peer[0]] += seconds
    compute = sum(spent[kind] for kind in BUSY)
    exchange = sum(spent[kind] for kind in EXCHANGES)
    return WorkerSeconds(stage, (last - first) / minibatches, compute, exchange, dict(waits))


def measured_stages(epoch: Timeline, span: SteadySpan, plan: Plan) -> StagesMeasured | None:
    """Returns what the stages did in the span of an epoch; None if a worker did not come so far."""
    workers = [
        worker_seconds(epoch.get(rank, ()), worker, plan.replicas[worker[0]], span)
        for rank, own in workers_by_rank(plan.rank_assignment).items()
        for worker in own
    ]
    known = [worker for worker in workers if worker is not None]
    return StagesMeasured.of(known) if len(known) == len(workers) else None

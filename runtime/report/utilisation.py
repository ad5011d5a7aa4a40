"""On what the ranks spent their time, and what the plan had promised. Pure: no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from pipedream.graph.plan import Plan
from pipedream.graph.timeline import Event, Timeline
from pipedream.schedule.action import BACKWARDS, ENDS_BACKWARD, Kind
from pipedream.schedule.policy import Policy

BUSY = BACKWARDS | {Kind.FORWARD, Kind.UPDATE}
"""What is work; the rest of a rank's time is the bubble, as in the simulation of a plan."""


@dataclass(frozen=True)
class Shares:
    """Seconds of each rank by the kind of action, out of `window` seconds that all ranks had.

    `steady`: the filling and the draining of the pipeline are left out.
    """

    window: float
    seconds: Mapping[int, Mapping[str, float]]
    steady: bool

    def share(self, rank: int, kinds: Iterable[str]) -> float:
        """Of the window, from 0 to 1."""
        spent = sum(self.seconds[rank].get(kind, 0.0) for kind in kinds)
        return spent / self.window if self.window else 0.0

    def busy(self, rank: int) -> float:
        return self.share(rank, BUSY)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time without a pass or an update."""
        return 1 - sum(map(self.busy, self.seconds)) / len(self.seconds)


def steady(policy: Policy, minibatches: int, known: int = 0) -> tuple[int, int] | None:
    """The minibatches of an epoch, from the first to before the last, that find the pipeline full.

    Schedules that empty the pipeline after every round fill it as often, which counts: for them all
    whole rounds but the first. None where the epoch is too short. `known`: the first minibatch of
    which it is known what happened.
    """
    replicas = policy.spec.replicas
    if policy.drains and len(replicas) > 1:
        turn = lcm(policy.spec.microbatches, *replicas)
        first, last = (-(-known // turn) + 1) * turn, minibatches // turn * turn
    else:
        filling = policy.in_flight(0) * replicas[0]
        first, last = known + filling, minibatches - filling
    return (first, last) if last > first else None


def shares(epochs: Sequence[Timeline], counted: tuple[int, int] | None) -> Shares:
    """What the ranks did from when minibatch `counted[0]` - 1 and all before it had gone backward
    everywhere to when `counted[1]` - 1 had; without `counted`, from first to last. Over all epochs.
    """
    window = 0.0
    seconds: dict[int, dict[str, float]] = {rank: {} for epoch in epochs for rank in epoch}
    for epoch in epochs:
        begin, end = _window(epoch, counted)
        window += end - begin
        for rank, events in epoch.items():
            for event in events:
                inside = min(event.end, end) - max(event.begin, begin)
                if inside > 0:
                    kind = event.action.kind
                    seconds[rank][kind] = seconds[rank].get(kind, 0.0) + inside
    return Shares(window, seconds, counted is not None)


def _window(epoch: Timeline, counted: tuple[int, int] | None) -> tuple[float, float]:
    events = [event for events in epoch.values() for event in events]
    if counted is None:
        begins = (event.begin for event in events)
        return min(begins, default=0.0), max((event.end for event in events), default=0.0)
    passes = [event for event in events if event.action.kind in ENDS_BACKWARD]
    first = min((event.begin for event in events), default=0.0)  # of an epoch gone on with
    begin, end = (
        max((event.end for event in passes if event.action.minibatch < count), default=first)
        for count in counted
    )
    return begin, end


def promised(plan: Plan) -> dict[int, float]:
    """The share of its time that each rank would be busy if its passes took what was measured and
    a minibatch what the cost model says.
    """
    period = plan.predicted.seconds_per_minibatch
    return {
        rank: stage.compute_seconds / len(ranks) / period if period else 0.0
        for stage, ranks in zip(plan.stages, plan.process_ranks, strict=True)
        for rank in ranks
    }


def in_flight(events: Iterable[Event]) -> list[tuple[float, float]]:
    """How many minibatches a rank has between forward and backward, from which second on."""
    steps, count = [], 0
    for event in events:
        if event.action.kind == Kind.FORWARD:
            count += 1
            steps.append((event.begin, float(count)))
        elif event.action.kind in ENDS_BACKWARD:
            count -= 1
            steps.append((event.end, float(count)))
    return steps


def versions(events: Sequence[Event]) -> list[tuple[float, float]]:
    """How many versions of its weights a rank holds, from which second on: the newest, and those
    that minibatches in flight run on.
    """
    steps: list[tuple[float, float]] = []
    # Not 0 where the beginning of an epoch is not known.
    newest = next((e.action.version for e in events if e.action.kind == Kind.FORWARD), 0)
    used = Counter[int]()
    for event in events:
        kind, version = event.action.kind, event.action.version
        if kind == Kind.FORWARD:
            if not version and not +used:
                newest = 0  # they count from 0 in each leg
            used[version] += 1
        elif kind in ENDS_BACKWARD:
            used[version] -= 1
        elif kind == Kind.UPDATE:
            newest = version
        else:
            continue
        steps.append((event.end, float(len({newest, *+used}))))
    return steps

"""The times of passes, for each rank and stage, from the events of a run. Pure: no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set

from pipedream.graph.measured_run import MeasuredRank
from pipedream.graph.plan import Plan, workers_by_rank
from pipedream.graph.profile import Quartiles
from pipedream.graph.timeline import Event, Timeline
from pipedream.schedule.action import BACKWARDS, RECEIVES, SENDS, Kind


def measured_ranks(
    epochs: Sequence[Timeline], counted: range, plan: Plan
) -> tuple[MeasuredRank, ...]:
    """Returns what each rank measured for each of its stages, over these minibatches of each epoch.

    Empty if a rank has done none of them.
    """
    workers = workers_by_rank(plan.rank_assignment)
    measured = []
    for rank, stage, replica in sorted((rank, *w) for rank, own in workers.items() for w in own):
        kept = [
            [e for e in epoch[rank] if e.action.minibatch in counted and e.action.stage == stage]
            for epoch in epochs
        ]
        forward, backward = _each(kept, {Kind.FORWARD}), _each(kept, BACKWARDS)
        if not forward or not backward:
            return ()
        updates = _each(kept, {Kind.UPDATE})
        measured.append(
            MeasuredRank(
                rank=rank,
                stage=stage,
                replica=replica,
                minibatches=len(backward),
                forward=_spread(forward),
                backward=_spread(backward),
                updates=len(updates),
                update=_some(updates),
                all_reduce=_some(_each(kept, {Kind.ALL_REDUCE, Kind.NORM})),
                sending=_some(_each(kept, SENDS)),
                waiting=_some(_each(kept, RECEIVES)),
            )
        )
    return tuple(measured)


def _each(epochs: Iterable[Iterable[Event]], kinds: Set[Kind]) -> list[float]:
    """Returns the seconds that the actions of these kinds took for each minibatch."""
    totals: list[float] = []
    for events in epochs:
        seconds: dict[int, float] = defaultdict(float)
        for event in events:
            if event.action.kind in kinds:
                seconds[event.action.minibatch] += event.end - event.begin
        totals += seconds.values()
    return totals


def _some(seconds: Sequence[float]) -> Quartiles | None:
    return _spread(seconds) if seconds else None


def _spread(seconds: Sequence[float]) -> Quartiles:
    # Begin and end are both by the clock of rank 0: what took no time may take less, by rounding.
    return Quartiles.of([max(0.0, time) for time in seconds])

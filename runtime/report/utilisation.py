"""What the ranks spent their time on, and what the plan predicts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipedream.graph.measured_run import MeasuredRank
from pipedream.graph.plan import Plan, Simulated, workers_by_rank
from pipedream.graph.profile import Quartiles
from pipedream.graph.shown.tables import make_console, print_table
from pipedream.graph.timeline import Event, Timeline
from pipedream.graph.units import show_seconds
from pipedream.schedule.action import (
    BACKWARDS,
    ENDS_BACKWARD,
    RECEIVES,
    SENDS,
    Kind,
    Worker,
    stages_and_replicas,
)
from pipedream.schedule.steady_state import BUSY, SteadySpan, bubble, steady_window

COLUMNS = {
    "forward": (Kind.FORWARD,),
    "backward": BACKWARDS,
    "update": (Kind.UPDATE,),
    "all-reduce": (Kind.ALL_REDUCE, Kind.NORM),
    "sending": SENDS,
    "waiting": RECEIVES,
}


@dataclass(frozen=True)
class Utilisation:
    """Seconds of each rank by the kind of action, out of `window` seconds for `minibatches`.

    `steady`: the filling and the draining of the pipeline are left out.
    """

    window: float
    minibatches: int
    seconds: Mapping[int, Mapping[str, float]]
    steady: bool

    def share(self, rank: int, kinds: Iterable[str]) -> float:
        """Returns the share of the window, from 0 to 1."""
        spent = sum(self.seconds[rank].get(kind, 0.0) for kind in kinds)
        return spent / self.window if self.window else 0.0

    def shares(self, rank: int) -> dict[str, float]:
        """Returns the shares by the names in `COLUMNS`, and what is left of it all as `rest`."""
        shares = {name: self.share(rank, kinds) for name, kinds in COLUMNS.items()}
        return {**shares, "rest": max(0.0, 1 - sum(shares.values()))}

    def busy(self, rank: int) -> float:
        return self.share(rank, BUSY)

    @property
    def seconds_per_minibatch(self) -> float:
        return self.window / max(1, self.minibatches)

    @property
    def bubble(self) -> float:
        """Returns the share of all ranks' time without a pass or an update."""
        busy = (spent.get(kind, 0.0) for spent in self.seconds.values() for kind in BUSY)
        return bubble(sum(busy), len(self.seconds), self.window)


def measure_utilisation(epochs: Sequence[Timeline], span: SteadySpan | None) -> Utilisation:
    """Returns what the ranks did in the steady state of the epochs; without a span, in all time."""
    window, minibatches = 0.0, 0
    seconds: dict[int, dict[str, float]] = {rank: {} for epoch in epochs for rank in epoch}
    for epoch in epochs:
        begin, end = steady_window(epoch, span)
        window += end - begin
        minibatches += _minibatches(epoch) if span is None else len(span)
        for rank, events in epoch.items():
            for event in events:
                inside = min(event.end, end) - max(event.begin, begin)
                if inside > 0:
                    kind = event.action.kind
                    seconds[rank][kind] = seconds[rank].get(kind, 0.0) + inside
    return Utilisation(window, minibatches, seconds, span is not None)


def _minibatches(epoch: Timeline) -> int:
    actions = (event.action for events in epoch.values() for event in events)
    return len({action.minibatch for action in actions if action.kind == Kind.FORWARD})


def in_flight(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Returns when, in seconds, a rank has how many minibatches between forward and backward."""
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
    """Returns when, in seconds, a rank holds how many versions of weights: of each of its stages
    the newest, and those that minibatches in flight use.
    """
    steps: list[tuple[float, float]] = []
    newest: dict[int, int] = {}
    for event in events:  # not 0 where the beginning of an epoch is not known
        if event.action.kind == Kind.FORWARD:
            newest.setdefault(event.action.stage, event.action.version)
    used = {stage: Counter[int]() for stage in newest}
    for event in events:
        kind, stage, version = event.action.kind, event.action.stage, event.action.version
        if kind == Kind.FORWARD:
            if not version and not +used[stage]:
                newest[stage] = 0  # they count from 0 in each segment
            used[stage][version] += 1
        elif kind in ENDS_BACKWARD:
            used[stage][version] -= 1
        elif kind == Kind.UPDATE:
            newest[stage] = version
        else:
            continue
        steps.append((event.end, float(sum(len({newest[s], *+used[s]}) for s in newest))))
    return steps


def print_utilisation(
    utilisation: Utilisation,
    workers: Mapping[int, Sequence[Worker]],
    hoped: Mapping[int, float],
    simulated: Simulated | None,
    clock_error: float,
) -> None:
    """Prints a row for each rank, then the bubble: predicted, simulated and measured.

    `workers` are those of each rank, `hoped` how busy it would be (`busy_shares`), if known.
    `clock_error`: by how many seconds the clocks of the ranks may differ.
    """
    console = make_console()
    print_table(console, _table(utilisation, workers, hoped), labels=3)
    parts = [f"bubble              {utilisation.bubble:.1%}"]
    if any(hoped.values()):
        parts.append(f"planned {max(0.0, 1 - sum(hoped.values()) / len(hoped)):.1%}")
    if simulated is not None:
        parts.append(f"simulated {simulated.bubble:.1%}")
    console.print(", ".join(parts))
    console.print(f"clocks of the ranks within {show_seconds(clock_error)} of each other")


def _table(
    utilisation: Utilisation, workers: Mapping[int, Sequence[Worker]], hoped: Mapping[int, float]
) -> Table:
    while_full = (
        "while the pipeline was full" if utilisation.steady else "filling and draining included"
    )
    table = Table(
        title=f"What each rank did, {while_full}",
        caption="Busy: forward, backward and update. Planned: the same as profiled, over "
        "the time per minibatch that the plan expects.",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    for heading in ("rank", "stage", "replica", *COLUMNS, "rest", "busy", "planned"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rank, own in workers.items():
        table.add_row(
            str(rank),
            *stages_and_replicas(own),
            *(f"{share:.1%}" for share in utilisation.shares(rank).values()),
            f"{utilisation.busy(rank):.1%}",
            f"{hoped[rank]:.1%}" if hoped.get(rank) else "-",
        )
    return table


def measured_ranks(
    epochs: Sequence[Timeline], counted: range, plan: Plan
) -> tuple[MeasuredRank, ...]:
    """Returns what each rank measured for each of its stages, over these minibatches of each epoch.

    Empty if a rank has done none of them.
    """
    workers = workers_by_rank(plan.rank_assignment)
    by_worker = sorted((rank, worker) for rank, own in workers.items() for worker in own)
    measured = [
        measured_rank([epoch[rank] for epoch in epochs], counted, rank, worker)
        for rank, worker in by_worker
    ]
    known = tuple(each for each in measured if each is not None)
    return known if len(known) == len(measured) else ()


def measured_rank(
    epochs: Iterable[Iterable[Event]], counted: range, rank: int, worker: Worker
) -> MeasuredRank | None:
    """Returns what a rank measured for a worker of its, over these minibatches of each epoch; None
    if it has done none of them.
    """
    stage, replica = worker
    kept = [
        [e for e in epoch if e.action.minibatch in counted and e.action.stage == stage]
        for epoch in epochs
    ]
    forward, backward = _each(kept, {Kind.FORWARD}), _each(kept, BACKWARDS)
    if not forward or not backward:
        return None
    updates = _each(kept, {Kind.UPDATE})
    return MeasuredRank(
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

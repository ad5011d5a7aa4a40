"""The status of each rank: what it is doing, published from a thread for rank 0.

The engine is not involved: it keeps its events, and says which action is under way.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch._C._distributed_c10d import Store

from pipedream.comm.device.threads import start_thread
from pipedream.graph.plan import RankAssignment
from pipedream.graph.timeline import DrawnAction, Event
from pipedream.schedule.action import PASSES, RECEIVES, Kind
from pipedream.schedule.steady_state import BUSY

SECONDS_BETWEEN_STATUSES = 0.5
RECENT_SECONDS = 5.0
_RECENT_PASSES = 10
_MOST_EVENTS = 2_000
"""The most events examined for a status, so that many short actions do not slow it down."""


@dataclass(frozen=True)
class Status:
    """One rank in the last seconds.

    `minibatch`: of its newest pass. `forward`, `backward`: seconds of a pass. `busy`, `waiting`:
    shares of its time, from 0 to 1. `waits_for`: whom it waited longest for, in words. `stuck`: for
    how many seconds it has been at the same action. `memory`: bytes of its tensors.
    """

    minibatch: int | None
    forward: float | None
    backward: float | None
    busy: float
    waiting: float
    waits_for: str | None
    stuck: float
    memory: int


def current_status(
    events: Sequence[Event],
    under_way: DrawnAction | None,
    assignment: RankAssignment,
    begin: float,
    now: float,
    memory: int,
) -> Status:
    """Returns the status of a rank that has done `events` since `begin` and is at `under_way`."""
    recent = list(events[-_MOST_EVENTS:])
    more = len(events) > len(recent)
    since = recent[-1].end if recent else begin
    if under_way is not None:
        recent.append(Event(under_way, since, now))
    start = max(begin, now - RECENT_SECONDS)
    if more:
        start = max(start, recent[0].begin)
    spent: dict[str, float] = {}
    waits: dict[str, float] = {}
    for event in recent:
        seconds = event.end - max(event.begin, start)
        if seconds > 0:
            spent[event.action.kind] = spent.get(event.action.kind, 0.0) + seconds
            whom = _awaited(event.action, assignment)
            if whom is not None:
                waits[whom] = waits.get(whom, 0.0) + seconds
    window = max(now - start, 1e-9)
    passes = [event for event in recent if event.action.kind in PASSES]
    return Status(
        minibatch=passes[-1].action.minibatch if passes else None,
        forward=_usual(events, Kind.FORWARD),
        backward=_usual(events, Kind.BACKWARD),
        busy=sum(spent.get(kind, 0.0) for kind in BUSY) / window,
        waiting=sum(waits.values()) / window,
        waits_for=max(waits, key=waits.__getitem__) if waits else None,
        stuck=0.0 if under_way is None else now - since,
        memory=memory,
    )


def _awaited(action: DrawnAction, assignment: RankAssignment) -> str | None:
    """Returns whom the action waits for, in words."""
    if action.kind in RECEIVES and action.peer is not None:
        stage, replica = action.peer
        return f"rank {assignment[stage][replica].leader}"
    if action.kind == Kind.NORM:
        return "all ranks"
    return "its replicas" if action.kind == Kind.ALL_REDUCE else None


def _usual(events: Sequence[Event], kind: Kind) -> float | None:
    """Returns the median seconds of the last few passes of that kind."""
    seconds = [e.end - e.begin for e in events[-10 * _RECENT_PASSES :] if e.action.kind == kind]
    return median(seconds[-_RECENT_PASSES:]) if seconds else None


@contextmanager
def publishing_status(
    store: Store, rank: int, status: Callable[[], Status], device: torch.device
) -> Iterator[None]:
    """Publishes what `status` returns twice a second, and once at the end."""
    ended = threading.Event()

    def publish() -> None:
        store.set(_key(rank), json.dumps(asdict(status())))

    def keep_publishing() -> None:
        while not ended.wait(SECONDS_BETWEEN_STATUSES):
            try:
                publish()
            except RuntimeError:  # the store is gone: the engine will say so
                return

    thread = start_thread(keep_publishing, "status", device)
    try:
        yield
        publish()
    finally:
        ended.set()
        thread.join()


def published_statuses(store: Store, ranks: Sequence[int]) -> dict[int, Status]:
    """Returns the newest status of each rank that has published one."""
    published = (rank for rank in ranks if store.check([_key(rank)]))
    return {rank: Status(**json.loads(store.get(_key(rank)))) for rank in published}


def _key(rank: int) -> str:
    return f"status/{rank}"

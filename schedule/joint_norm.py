"""The updates of a rank whose workers share one norm of the gradients with all others."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from pipedream.schedule.action import Action, Kind, Worker

_CLOSING = frozenset({Kind.ALL_REDUCE, Kind.NORM, Kind.UPDATE})


def updates_together(actions: Iterable[Action], workers: Collection[Worker]) -> list[Action]:
    """Moves each UPDATE of a rank with these `workers` behind the last NORM of its round there.

    The ranks agree when all workers of each have come to their NORM, so none of them has a norm to
    update by before. A NORM stays where its worker has finished the round: passes of the next round
    that come before the UPDATE (2bw) add to gradients of their own. What closes that next round
    waits behind the UPDATE.

    For two workers that finish a round one after the other, the first of them with passes between:

        0N0 0U0 0F4 2N0 2U0     becomes     0N0 0F4 2N0 0U0 2U0
    """
    written: list[Action] = []
    deferred: dict[Worker, deque[Action]] = {worker: deque() for worker in workers}
    for action in actions:
        waiting_here = deferred[action.stage, action.replica]
        if action.kind is Kind.UPDATE or (waiting_here and action.kind in _CLOSING):
            waiting_here.append(action)
        else:
            written.append(action)
        while all(deferred.values()):
            written += [waiting.popleft() for waiting in deferred.values()]
            for waiting in deferred.values():
                while waiting and waiting[0].kind is not Kind.UPDATE:
                    written.append(waiting.popleft())
    return written

"""Where a rank whose workers add up gradients with other workers does so."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator

from pipedream.schedule.action import Action, Kind, Worker

_CLOSING = frozenset({Kind.ALL_REDUCE, Kind.NORM, Kind.UPDATE})


def sums_together(actions: Iterable[Action], workers: Collection[Worker]) -> list[Action]:
    """Moves what closes a round of these `workers` of a rank behind the last backward pass of all:
    each ALL_REDUCE, in the order of the stages, and then the rest.

    So ranks with the same stages come to their sums in the same order, also one whose replica has
    no minibatch in the round, and of stages that share a parameter all gradients are there. Only
    for a pipeline that is empty after each round: no pass of the next one comes in between. The
    messages of a sum are on their way since the gradients came, so it is not later for that.

    For two workers that finish a round one after the other:

        2B1 2AR0 2U0 0B1 0AR0 0U0     becomes     2B1 0B1 0AR0 2AR0 0U0 2U0
    """
    written: list[Action] = []
    closing: dict[Worker, deque[Action]] = {worker: deque() for worker in sorted(workers)}
    for action in actions:
        own = closing.get((action.stage, action.replica))
        if own is None or action.kind not in _CLOSING:
            written.append(action)
            continue
        own.append(action)
        if action.kind is Kind.UPDATE and all(closing.values()):
            written += [each.popleft() for each in closing.values()]
            written += [rest for each in closing.values() for rest in _to_update(each)]
    return written


def _to_update(closing: deque[Action]) -> Iterator[Action]:
    while True:
        action = closing.popleft()
        yield action
        if action.kind is Kind.UPDATE:
            return

"""Moves what closes the rounds of a rank's workers to where ranks can wait for one another."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator

from pipedream.schedule.action import CLOSING, Action, Kind, Worker


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
        if action.kind is Kind.UPDATE or (waiting_here and action.kind in CLOSING):
            waiting_here.append(action)
        else:
            written.append(action)
        while all(deferred.values()):
            written += [waiting.popleft() for waiting in deferred.values()]
            for waiting in deferred.values():
                while waiting and waiting[0].kind is not Kind.UPDATE:
                    written.append(waiting.popleft())
    return written


def sums_together(
    actions: Iterable[Action], workers: Collection[Worker], tied: Collection[int] = ()
) -> list[Action]:
    """Moves what closes a round of these `workers`, all of a rank, behind the last backward pass of
    the round: each ALL_REDUCE, the latest stage first, and then the rest.

    A rank that waits for a sum has then nothing left to do that others wait for, and those with the
    same stages come to their sums in the same order, also one whose replica has no minibatch in the
    round. It is about the order in which their gradients come, and the one in which ranks begin
    these sums: one that began another first could wait for a peer that waits for it. Of stages that
    share a parameter all gradients are there. Only for a pipeline that is empty after each round:
    no pass of the next one comes in between. The messages of a sum over replicas are on their way
    since the gradients came, so it is not later for that. Stages that are `tied` come last: the sum
    over what they share is begun with the last of them, when no other of the rank is to begin.

    For two workers that finish a round one after the other:

        2B1 2AR0 2U0 0B1 0AR0 0U0     becomes     2B1 0B1 2AR0 0AR0 0U0 2U0
    """
    written: list[Action] = []
    closing: dict[Worker, deque[Action]] = {worker: deque() for worker in sorted(workers)}
    for action in actions:
        if action.kind not in CLOSING:
            written.append(action)
            continue
        closing[action.stage, action.replica].append(action)
        if action.kind is Kind.UPDATE and all(closing.values()):
            whole = [ended for of_worker in closing.values() for ended in _to_update(of_worker)]
            sums = [ended for ended in whole if ended.kind is Kind.ALL_REDUCE]
            written += sorted(sums, key=lambda ended: (ended.stage in tied, -ended.stage))
            written += [ended for ended in whole if ended.kind is not Kind.ALL_REDUCE]
    return written


def _to_update(closing: deque[Action]) -> Iterator[Action]:
    """Takes the actions that close one round of a worker."""
    while (action := closing.popleft()).kind is not Kind.UPDATE:
        yield action
    yield action

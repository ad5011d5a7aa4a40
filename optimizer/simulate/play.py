"""Plays a program: when each action begins and ends, with links shared as TCP shares them.

Activations from one rank to another form a stream, and so do gradients; in each, messages go one
after the other, each once its receive is posted. A sum over replicas is a stream through all ports
of its ring at once. Streams that pass the same port share it fairly at every moment (`links.py`).
So time is a sequence of moments: a pass ends, or an item of a stream is through; between two of
them all rates are constant.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numba import njit

from pipedream.optimizer.cuts.planning_graph import Floats, Ints
from pipedream.optimizer.simulate.links import (
    Streams,
    enqueue,
    idle_streams,
    next_through,
    pop_through,
)

_PASS, _SEND, _RECEIVE, _SUM, _LATE_SUM, _CONTRIBUTE = range(6)

# What a moment in the heap is: a pass ends, an item arrives, a rank can give its share of a part.
_ENDS, _ARRIVES, _GIVES = range(3)


class Ranks(NamedTuple):
    """The actions, as in `Program`, and the `seconds` of the passes and updates among them."""

    begin: Ints
    op: Ints
    subject: Ints
    seconds: Floats


class Items(NamedTuple):
    """What goes through streams: all messages, then the parts of all sums.

    `stream` (-1: between stages of one rank); `size` in bytes; `latency`; `busy` seconds of the
    ranks at its ends. `receiver` of each message.
    """

    stream: Ints
    size: Floats
    latency: Floats
    busy: Floats
    receiver: Ints


class Sums(NamedTuple):
    """The parts of sum s are the items `first[s]` to before `first[s + 1]`. A part begins once all
    `members[s]` workers have done the share `after` of their last backward pass of the round.

    `sum` and `after` have an entry for each part.
    """

    first: Ints
    members: Ints
    sum: Ints
    after: Floats


class _State(NamedTuple):
    """How far everything is.

    Of each rank: the next action, the next receive to post, seconds of work that messages have
    caused and that are still to be done, whether it is in a pass, and the sum that it waits for. Of
    each action when it begins and ends; of each message whether it is posted, and has arrived; of
    each part how many workers have not given their share; of each sum how many parts are left.
    """

    position: Ints
    posted_to: Ints
    debt: Floats
    running: Ints
    awaited: Ints
    begin: Floats
    end: Floats
    posted: Ints
    arrived: Ints
    missing: Ints
    left: Ints


def play(
    ranks: Ranks, items: Items, sums: Sums, streams: Streams, ahead: int
) -> tuple[Floats, Floats]:
    """When each action begins and ends; receives are posted so many actions `ahead`."""
    begin, end = _play(ranks, items, sums, streams, ahead)
    assert np.isfinite(end).all(), "deadlock"
    return begin, end


@njit(cache=True)
def _play(ranks, items, sums, streams, ahead):  # type: ignore[no-untyped-def]
    state = _at_the_start(ranks, items, sums)
    flows = idle_streams(len(items.stream), streams)
    ready = list(range(len(ranks.begin) - 1))
    heap = [(np.inf, 0, 0)]  # the last moment: nothing happens any more
    due = [(np.inf, 0)]
    due.pop()
    now = 0.0
    while True:
        while ready:
            _go_on(ready.pop(), now, ready, heap, state, flows, ranks, items, sums, streams, ahead)
        through = next_through(flows, due, streams, now)
        now = min(through, heap[0][0])
        if now == np.inf:
            return state.begin, state.end
        while through <= now:
            item = pop_through(flows, due, items.size, state.posted, streams, now)
            if item < 0:
                break
            heappush(heap, (now + items.latency[item], _ARRIVES, item))
        while heap[0][0] <= now:
            _, what, number = heappop(heap)
            if what == _ENDS:
                state.running[number] = 0
                state.position[number] += 1
                ready.append(number)
            elif what == _GIVES:
                _give(number, now, heap, state, flows, items, sums, streams)
            else:
                _arrive(number, ready, state, items, sums)


@njit(cache=True)
def _at_the_start(ranks, items, sums):  # type: ignore[no-untyped-def]
    count, actions, messages = len(ranks.begin) - 1, len(ranks.op), len(items.receiver)
    # A part of a sum is posted from the start: its ranks begin it themselves.
    posted = np.ones(len(items.stream), dtype=np.int64)
    posted[:messages] = 0
    return _State(
        ranks.begin[:-1].copy(),
        ranks.begin[:-1].copy(),
        np.zeros(count),
        np.zeros(count, dtype=np.int64),
        np.full(count, -1, dtype=np.int64),
        np.full(actions, np.inf),
        np.full(actions, np.inf),
        posted,
        np.zeros(messages, dtype=np.int64),
        sums.members[sums.sum],
        sums.first[1:] - sums.first[:-1],
    )


@njit(cache=True)
def _go_on(rank, now, ready, heap, state, flows, ranks, items, sums, streams, ahead):  # type: ignore[no-untyped-def]
    """Performs actions of the rank until one takes time or has to wait."""
    stop = ranks.begin[rank + 1]
    while state.position[rank] < stop and not state.running[rank]:
        at = state.position[rank]
        _post(rank, min(stop, at + ahead), now, state, flows, ranks, items, streams)
        op, subject = ranks.op[at], ranks.subject[at]
        if state.begin[at] == np.inf:
            state.begin[at] = now
            if op in (_LATE_SUM, _CONTRIBUTE):
                _promise(subject, now, 0.0, heap, sums, len(items.receiver))
        if op == _PASS:
            seconds = ranks.seconds[at] + state.debt[rank]
            state.debt[rank] = 0.0
            state.running[rank] = 1
            state.end[at] = now + seconds
            heappush(heap, (now + seconds, _ENDS, rank))
            if subject >= 0:
                _promise(subject, now, seconds, heap, sums, len(items.receiver))
            return
        if op == _SEND:
            state.debt[rank] += items.busy[subject]
            _begin(subject, now, heap, state, flows, items, streams)
        elif op == _RECEIVE:
            if not state.arrived[subject]:
                return
            state.debt[rank] += items.busy[subject]
        elif op != _CONTRIBUTE and state.left[subject]:
            state.awaited[rank] = subject
            return
        state.end[at] = now
        state.position[rank] += 1


@njit(cache=True)
def _post(rank, until, now, state, flows, ranks, items, streams):  # type: ignore[no-untyped-def]
    """Posts the receives among the rank's actions before `until`."""
    for at in range(state.posted_to[rank], until):
        if ranks.op[at] == _RECEIVE:
            item = ranks.subject[at]
            state.posted[item] = 1
            if items.stream[item] >= 0:
                enqueue(flows, -1, items.stream[item], items.size, state.posted, streams, now)
    state.posted_to[rank] = max(until, state.posted_to[rank])


@njit(cache=True)
def _begin(item, now, heap, state, flows, items, streams):  # type: ignore[no-untyped-def]
    if items.stream[item] < 0:
        heappush(heap, (now, _ARRIVES, item))
    else:
        enqueue(flows, item, items.stream[item], items.size, state.posted, streams, now)


@njit(cache=True)
def _promise(which, now, seconds, heap, sums, messages):  # type: ignore[no-untyped-def]
    """Notes that the rank has the gradients of each part during a pass that begins."""
    for part in range(sums.first[which], sums.first[which + 1]):
        heappush(heap, (now + seconds * sums.after[part - messages], _GIVES, part))


@njit(cache=True)
def _give(part, now, heap, state, flows, items, sums, streams):  # type: ignore[no-untyped-def]
    at = part - len(items.receiver)
    state.missing[at] -= 1
    if state.missing[at] == 0:
        _begin(part, now, heap, state, flows, items, streams)


@njit(cache=True)
def _arrive(item, ready, state, items, sums):  # type: ignore[no-untyped-def]
    messages = len(items.receiver)
    if item < messages:
        state.arrived[item] = 1
        ready.append(items.receiver[item])
        return
    which = sums.sum[item - messages]
    state.left[which] -= 1
    if state.left[which] == 0:
        for rank in range(len(state.awaited)):
            if state.awaited[rank] == which:
                state.awaited[rank] = -1
                ready.append(rank)

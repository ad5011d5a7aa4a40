"""Streams that share the ports of a network, at every moment fairly.

Max-min fairness (Bertsekas and Gallager, "Data Networks", 1992, section 6.5.2): no stream can have
more without taking from one that has as little. It is what TCP gives to long streams, nearly.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numba import njit

from pipedream.optimizer.cuts.planning_graph import Floats, Ints


class Streams(NamedTuple):
    """The ports of stream s are `port[first[s]:first[s + 1]]`, the streams of port p
    `stream[begin[p]:begin[p + 1]]`; `rate`: of each port, in bytes per second.
    """

    first: Ints
    port: Ints
    begin: Ints
    stream: Ints
    rate: Floats


class Flows(NamedTuple):
    """What goes through the streams.

    Of each stream the first and last item of its queue (-1 if it is empty); whether the first is on
    its way, then how many bytes were `left` at the time `since`, at which `rate` they go, and
    `until` when. `after` each item, the next of its queue. Of each port whether a stream through it
    has begun or ended and rates have `changed`; first of the ports `concerned` are the `counted`
    changed ones; while new rates are found the `room` that is left in each, and how many streams,
    its `users`, have none of it yet.

    Beside it goes a heap of what is `due`: when each stream is through, and streams to be left out
    since that is no longer so.
    """

    first: Ints
    last: Ints
    after: Ints
    active: Ints
    left: Floats
    rate: Floats
    since: Floats
    until: Floats
    changed: Ints
    concerned: Ints
    counted: Ints
    room: Floats
    users: Ints


@njit(cache=True)
def idle_streams(items, streams):  # type: ignore[no-untyped-def]
    """The flows of streams with empty queues, for so many items."""
    count, ports = len(streams.first) - 1, len(streams.begin) - 1
    return Flows(
        np.full(count, -1, dtype=np.int64),
        np.full(count, -1, dtype=np.int64),
        np.full(items, -1, dtype=np.int64),
        np.zeros(count, dtype=np.int64),
        np.zeros(count),
        np.zeros(count),
        np.zeros(count),
        np.full(count, np.inf),
        np.zeros(ports, dtype=np.int64),
        np.zeros(ports, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
        np.zeros(ports),
        np.zeros(ports, dtype=np.int64),
    )


@njit(cache=True)
def enqueue(flows, item, stream, size, posted, streams, now):  # type: ignore[no-untyped-def]
    """Puts `item`, if it is not -1, at the end of the stream's queue; the first goes if it may."""
    if item >= 0:
        if flows.first[stream] < 0:
            flows.first[stream] = item
        else:
            flows.after[flows.last[stream]] = item
        flows.last[stream] = item
    first = flows.first[stream]
    if first >= 0 and posted[first] and not flows.active[stream]:
        flows.active[stream] = 1
        flows.left[stream] = size[first]
        flows.since[stream] = now
        flows.rate[stream] = 0.0
        _change(flows, stream, streams)


@njit(cache=True)
def _change(flows, stream, streams):  # type: ignore[no-untyped-def]
    for k in range(streams.first[stream], streams.first[stream + 1]):
        _concern(flows, streams.port[k])


@njit(cache=True)
def _concern(flows, port):  # type: ignore[no-untyped-def]
    if not flows.changed[port]:
        flows.changed[port] = 1
        flows.concerned[flows.counted[0]] = port
        flows.counted[0] += 1


@njit(cache=True)
def next_through(flows, due, streams, now):  # type: ignore[no-untyped-def]
    """When the next item is through its stream; infinite if none is on its way."""
    if flows.counted[0]:
        _share(flows, due, streams, now)
    while len(due) and flows.until[due[0][1]] != due[0][0]:
        heappop(due)
    return due[0][0] if len(due) else np.inf


@njit(cache=True)
def pop_through(flows, due, size, posted, streams, now):  # type: ignore[no-untyped-def]
    """An item that is through at this time, -1 if there is none; the next of its stream goes."""
    while len(due) and flows.until[due[0][1]] != due[0][0]:
        heappop(due)
    if not len(due) or due[0][0] > now:
        return -1
    _, stream = heappop(due)
    item = flows.first[stream]
    following = flows.after[item]
    flows.first[stream] = following
    if following >= 0 and posted[following]:
        flows.left[stream] = size[following]
        flows.since[stream] = now
        flows.until[stream] = now + size[following] / flows.rate[stream]
        heappush(due, (flows.until[stream], stream))
    else:
        flows.active[stream] = 0
        flows.until[stream] = np.inf
        _change(flows, stream, streams)
    return item


@njit(cache=True)
def _share(flows, due, streams, now):  # type: ignore[no-untyped-def]
    """New rates for the streams that have to do with the changed ports.

    Progressive filling: the port with the least room for each of its streams sets their rate.
    """
    ports = _concerned(flows, streams, now)
    while True:
        tightest, share = -1, np.inf
        for port in flows.concerned[:ports]:
            if flows.users[port] and flows.room[port] / flows.users[port] < share:
                tightest, share = port, flows.room[port] / flows.users[port]
        if tightest < 0:
            break
        for k in range(streams.begin[tightest], streams.begin[tightest + 1]):
            stream = streams.stream[k]
            if flows.active[stream] and flows.rate[stream] == 0.0:
                flows.rate[stream] = share
                flows.until[stream] = now + flows.left[stream] / share
                heappush(due, (flows.until[stream], stream))
                for j in range(streams.first[stream], streams.first[stream + 1]):
                    port = streams.port[j]
                    flows.room[port] = max(flows.room[port] - share, 1e-9 * streams.rate[port])
                    flows.users[port] -= 1
    flows.changed[flows.concerned[:ports]] = 0
    flows.counted[0] = 0


@njit(cache=True)
def _concerned(flows, streams, now):  # type: ignore[no-untyped-def]
    """Lists the ports connected with changed ones by streams on their way; returns how many.

    All their room is free then, and their streams have no rate.
    """
    at = 0
    while at < flows.counted[0]:
        port = flows.concerned[at]
        at += 1
        flows.room[port], flows.users[port] = streams.rate[port], 0
        for k in range(streams.begin[port], streams.begin[port + 1]):
            stream = streams.stream[k]
            if not flows.active[stream]:
                continue
            flows.users[port] += 1
            gone = flows.rate[stream] * (now - flows.since[stream])
            flows.left[stream] = max(flows.left[stream] - gone, 0.0)
            flows.since[stream] = now
            flows.rate[stream] = 0.0
            _change(flows, stream, streams)
    return flows.counted[0]

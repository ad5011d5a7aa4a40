"""Times messages and all-reduces between ranks by size, at each level of the cluster.

One pair or group of ranks is measured while all others wait. This gives the capacity of a link; the
simulator accounts for links that are shared. Its times are fitted by a line where one fits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch.distributed as dist
from scipy.optimize import nnls
from torch import Tensor

from pipedream.graph.cluster import Cluster, Link
from pipedream.profiler.network.interference import Traffic, Work, busy
from pipedream.profiler.network.levels import NetworkLevel, Ranks
from pipedream.profiler.network.options import Effort
from pipedream.profiler.network.wire import Wait, Wire
from pipedream.profiler.timing.stopwatch import stopwatch

_TIMED_BYTES = 4e6
_FEWEST, _MOST, _MOST_WITH_WORK = 2, 64, 16
_GRADIENT_BYTES = 64 * 2**20
"""More than caches hold, as the gradients of a model."""

MOST_MISS = 0.2
"""The points are used instead of a line with a larger relative error than this at any size."""

_FASTEST = 1e15  # bytes per second, if more bytes take no longer


@dataclass(frozen=True)
class LinkFit:
    """`line`: latency plus bytes over bandwidth. `miss`: its largest relative error at any size.
    `link`: the line, or the points if that error is too large.
    """

    line: Link
    miss: float
    link: Link


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> LinkFit:
    """Fits the line with the least sum of squared relative errors and no negative coefficient.

    `sizes`: two or more, in bytes, ascending; `seconds`: the time of a message of each size.
    """
    size, taken = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    rows = np.stack([1 / taken, size / taken], axis=1)
    scale = rows.max(axis=0)  # without it the columns differ by many powers of ten
    solution, _ = nnls(rows / scale, np.ones(len(taken)))
    latency, per_byte = (solution / scale).tolist()
    line = Link(latency=latency, bandwidth=min(_FASTEST, 1 / max(per_byte, 1 / _FASTEST)))
    miss = float(np.max(np.abs(line.seconds(size) - taken) / taken))
    # Disturbances only add time: no message takes longer than a larger one.
    never_falling = np.minimum.accumulate(taken[::-1])[::-1]
    points = tuple(zip(size.tolist(), never_falling.tolist(), strict=True))
    return LinkFit(line, miss, line if miss <= MOST_MISS else Link(points=points))


@dataclass(frozen=True)
class Timed:
    """The times of messages, of all-reduces or of all-gathers at one level by size.

    `seconds`: the median over pairs or groups of the median over repeats. `spread`: half the
    interquartile range over the median. `slowest`: the largest ratio, over sizes, of the slowest
    pair or group to the median. `busy`: the share of the time in which the ranks at its ends cannot
    compute.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    spread: tuple[float, ...]
    slowest: float
    fit: LinkFit
    busy: float = 0.0

    @property
    def link(self) -> Link:
        """Returns the link for the cluster file."""
        return self.fit.link.model_copy(update={"busy": round(self.busy, 2)})

    def alone(self, size: float) -> float:
        """Returns the seconds of one of so many bytes, as fitted."""
        return float(self.fit.link.seconds(size))

    @staticmethod
    def of(sizes: Sequence[int], samples: Sequence[Sequence[Sequence[float]]]) -> Timed:
        """`samples[pair][size]` has the repeats of one pair or group."""
        medians = np.array([[np.median(repeats) for repeats in one] for one in samples])
        widths = np.array([[_width(repeats) for repeats in one] for one in samples])
        seconds = np.median(medians, axis=0)
        return Timed(
            sizes=tuple(sizes),
            seconds=tuple(seconds.tolist()),
            spread=tuple(np.median(widths, axis=0).tolist()),
            slowest=float((medians / seconds).max()),
            fit=fit_link(sizes, seconds.tolist()),
        )


@dataclass(frozen=True)
class MeasuredLevel:
    """The measurements of a level."""

    level: NetworkLevel
    send: Timed
    all_reduce: Timed
    all_gather: Timed


def cluster(measured: Sequence[MeasuredLevel]) -> Cluster:
    """Returns the measured cluster, for pd-optimize."""
    return Cluster(
        machines=tuple(each.level.count for each in measured),
        names=tuple(each.level.name for each in measured),
        bandwidth=tuple(each.send.fit.line.bandwidth or 0.0 for each in measured),
        latency=tuple(each.send.fit.line.latency for each in measured),
        send=tuple(each.send.link for each in measured),
        all_reduce=tuple(each.all_reduce.link for each in measured),
        all_gather=tuple(each.all_gather.link for each in measured),
    )


def measure(
    level: NetworkLevel,
    wire: Wire,
    effort: Effort,
    work: Work | None = None,
    step: Callable[[str], None] = lambda what: None,
) -> MeasuredLevel:
    """Measures a level; called by all ranks at once, and all get the result. Raises PeerLost.

    `work`: what is computed beside sums [default: products, as beside messages]. `step` is called
    with a description of each measurement.
    """
    send, sums, gathers = [], [], []
    product = Work.product(wire.device)
    room = _Room.of(wire, effort.largest)
    for pair in level.pairs:
        step(f"{level.name}: messages from rank {pair[0]} to {pair[1]}")
        send.append(_messages(wire, pair, effort))
    for group in level.groups:
        step(f"{level.name}: sums over ranks {', '.join(map(str, group))}")
        once = [_adding(wire, group, size, room) for size in effort.sizes]
        sums.append(_repeated(wire, group, effort, once))
        step(f"{level.name}: gathers over ranks {', '.join(map(str, group))}")
        once = [_gathering(wire, group, size, product) for size in effort.sizes]
        gathers.append(_repeated(wire, group, effort, once))
    step(f"{level.name}: compute during messages and sums")
    pair, group = level.pairs[0], level.groups[0]
    passed, added = Timed.of(effort.sizes, send), Timed.of(effort.sizes, sums)
    messages = Traffic.messages(passed.alone, partial(_passing, wire, pair))
    summing = Traffic.sums(added.alone, partial(room.summing, wire, group))
    return MeasuredLevel(
        level,
        replace(passed, busy=busy(wire, pair, effort, messages, product)),
        replace(added, busy=busy(wire, group, effort, summing, work or product)),
        replace(Timed.of(effort.sizes, gathers), busy=1.0),  # the ranks of a mesh wait for it
    )


def _passing(wire: Wire, pair: Ranks, size: int) -> Callable[[], Wait | None]:
    """Returns a function that starts a message from the first to the second rank."""
    source, target = pair
    if dist.get_rank() == source:
        tensor = wire.tensor(size)
        return lambda: wire.send(tensor, target)
    return lambda: wire.post(size, source)


def _messages(wire: Wire, pair: Ranks, effort: Effort) -> list[list[float]]:
    """Returns the seconds of a message, [size][repeat].

    The time that a message adds to a stream of its size, plus the latency: half a round trip of the
    smallest message, less the time that this one adds to a stream.
    """
    sizes = effort.sizes
    kinds = [_returning(wire, pair, sizes[0]), *(_streaming(wire, pair, size) for size in sizes)]
    trips, *streams = _repeated(wire, pair, effort, kinds)
    one_way = float(np.median(trips))
    each = [
        [max(whole - 2 * one_way, whole / 4) / _count(size) for whole in stream]
        for size, stream in zip(sizes, streams, strict=True)
    ]
    latency = max(0.0, one_way - float(np.median(each[0])))
    return [[latency + seconds for seconds in repeats] for repeats in each]


def _repeated(
    wire: Wire, ranks: Ranks, effort: Effort, kinds: Sequence[Callable[[], float]]
) -> list[list[float]]:
    """Returns the results of each measurement on the first of the ranks, [kind][repeat].

    The kinds take turns, so that a temporary disturbance does not affect only one of them. Ranks
    other than `ranks` wait.
    """
    results = [[0.0] * len(kinds)] * effort.repeats
    if dist.get_rank() in ranks:
        rounds = range(effort.warmup + effort.repeats)
        results = [[once() for once in kinds] for _ in rounds][effort.warmup :]
    known = wire.broadcast([seconds for one in results for seconds in one], ranks[0])
    return [known[kind :: len(kinds)] for kind in range(len(kinds))]


@dataclass(frozen=True)
class _Room:
    """Holds memory for gradients, and for the sums of them. Both are used in turn, from end to end:
    what is added up next is in no cache.
    """

    gradients: Tensor
    sums: Tensor

    @staticmethod
    def of(wire: Wire, largest: int) -> _Room:
        size = max(largest, _GRADIENT_BYTES)
        return _Room(wire.tensor(size), wire.tensor(size))

    def turns(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields tensors of `size` bytes each."""
        count = len(self.gradients) // (size // 4)
        for turn in cycle(range(count)):
            part = slice(turn * (size // 4), (turn + 1) * (size // 4))
            yield self.gradients[part], self.sums[part]

    def summing(self, wire: Wire, group: Ranks, size: int) -> Callable[[], Wait | None]:
        """Returns a function that starts a sum over the group."""
        turns = self.turns(size)
        return lambda: wire.add_up(*next(turns), group)


def _adding(wire: Wire, group: Ranks, size: int, room: _Room) -> Callable[[], float]:
    """Measures all-reduces of a size, one after the other: the seconds of each."""
    turns = room.turns(size)

    def once() -> float:
        wire.add_up(room.gradients[:1], room.sums[:1], group)()  # all ranks have arrived
        wire.synchronize()
        begin = time.perf_counter()
        for _ in range(_count(size)):
            wire.add_up(*next(turns), group)()
        wire.synchronize()
        return (time.perf_counter() - begin) / _count(size)

    return once


def _gathering(wire: Wire, group: Ranks, size: int, work: Work) -> Callable[[], float]:
    """Measures all-gathers of `size` bytes in all, each after a run of the work: the mean seconds
    of one. A rank whose work took longer keeps the others waiting, as in training, where all that
    is waited adds up.
    """
    if dist.get_rank() not in group:
        return lambda: 0.0
    gather, watch = wire.gatherer(size, group), stopwatch(wire.device)
    count = min(_MOST_WITH_WORK, _count(size))

    def timed() -> tuple[Any, Any]:
        work.run(lambda: None)
        start = watch.mark()
        gather()
        return start, watch.mark()

    def once() -> float:
        timed()  # all ranks have arrived
        marks = [timed() for _ in range(count)]
        return statistics.fmean(watch.seconds(start, end) for start, end in marks)

    return once


def _count(size: int) -> int:
    """Returns the number of messages of a size that are timed together."""
    return max(_FEWEST, min(_MOST, int(_TIMED_BYTES / size)))


def _returning(wire: Wire, pair: Ranks, size: int) -> Callable[[], float]:
    """Measures round trips between the two: half the seconds of one."""
    here = dist.get_rank()
    there = pair[1] if here == pair[0] else pair[0]
    tensor = wire.tensor(size)

    def once() -> float:
        begin = 0.0
        for trip in range(_MOST + 1):
            if trip == 1:  # after the first trip both ranks are ready
                begin = time.perf_counter()
            arrived = wire.post(size, there)
            if here == pair[0]:
                wire.send(tensor, there)
            arrived()
            wire.synchronize()
            if here == pair[1]:
                wire.send(tensor, there)
        return (time.perf_counter() - begin) / _MOST / 2

    return once


def _streaming(wire: Wire, pair: Ranks, size: int) -> Callable[[], float]:
    """Measures a stream of messages of a size from the first to the second rank of the pair.

    The first rank takes the time from its first send until the second confirms the last arrival.
    """
    source, target = pair
    here = dist.get_rank()
    tensor, signal = wire.tensor(size if here == source else 0), wire.tensor(4)

    def send() -> float:
        wire.post(4, target)()
        wire.synchronize()
        begin = time.perf_counter()
        done = wire.post(4, target)
        for _ in range(_count(size)):
            wire.send(tensor, target)
        done()
        wire.synchronize()
        return time.perf_counter() - begin

    def receive() -> float:
        arriving = [wire.post(size, source) for _ in range(_count(size))]
        wire.send(signal, source)
        for arrived in arriving:
            arrived()
        wire.synchronize()
        wire.send(signal, source)
        wire.synchronize()
        return 1.0

    return send if here == source else receive


def _width(repeats: Sequence[float]) -> float:
    """Returns half the interquartile range over the median."""
    low, middle, high = np.quantile(repeats, [0.25, 0.5, 0.75])
    return float((high - low) / 2 / middle)

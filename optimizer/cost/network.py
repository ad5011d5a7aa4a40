"""The network of a cluster: through which ports a message passes, and how much of them it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from pipedream.graph.cluster import Cluster, Link


class Port(NamedTuple):
    """Where a component of `level` - 1 (0: a device) sends to or receives from its neighbours.

    `component` counts all such components of the cluster. Ports are full duplex: what goes out
    takes nothing from what comes in.
    """

    level: int
    component: int
    out: bool


@dataclass(frozen=True)
class Transfer:
    """Bytes through ports at once, on an idle network `seconds` and then `latency`.

    `busy`: seconds of both in which the ranks at its ends cannot compute.
    """

    seconds: float
    latency: float
    busy: float

    @property
    def total(self) -> float:
        """Seconds on an idle network."""
        return self.seconds + self.latency


class Network:
    """What messages and sums need of the ports of a cluster.

    Two ranks meet at the lowest level at which both are in one component. A message between them
    leaves through the ports of every component around its source below that level, and enters
    through those around its target. The slowest of them sets its pace, and the level where the
    ranks meet its latency.

    An all-reduce is a ring of its m ranks (Patarasuk and Yuan, 2009): 2 (m - 1) steps, each sending
    an m-th of the bytes to the next rank. Steps wait for one another, so the slowest port of the
    ring sets the pace of all.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        levels = range(1, len(cluster.machines) + 1)
        self.links = [cluster.link(level) for level in levels]
        self.ring_links = [cluster.ring_link(level) for level in levels]

    def message(self, source: int, target: int, amount: float) -> Transfer:
        """A message of `amount` bytes."""
        levels = self.meet(source, target)
        seconds = [_occupied(link, amount) for link in self.links[:levels]]
        return _at_once(self.links, seconds, latency(self.links[levels - 1]))

    def all_reduce(self, ranks: Sequence[int], amount: float) -> Transfer:
        """A sum of `amount` bytes over the ranks."""
        steps, part = 2 * (len(ranks) - 1), amount / len(ranks)
        levels = sorted({self.meet(*pair) for pair in _ring(ranks)})
        if not levels:
            return Transfer(0.0, 0.0, 0.0)
        links = self.ring_links[: levels[-1]]
        seconds = [steps * _occupied(link, part) for link in links]
        slow = max(latency(self.ring_links[level - 1]) for level in levels)
        return _at_once(links, seconds, steps * slow)

    def meet(self, one: int, other: int) -> int:
        """The lowest level at which both ranks are in one component, 1 the innermost."""
        assert one != other
        for level, count in enumerate(self.cluster.machines, start=1):
            one, other = one // count, other // count
            if one == other:
                return level
        raise AssertionError("a rank outside the cluster")

    def path(self, source: int, target: int) -> Iterator[Port]:
        """The ports that a message passes."""
        for level in range(1, self.meet(source, target) + 1):
            yield Port(level, source, True)
            yield Port(level, target, False)
            count = self.cluster.machines[level - 1]
            source, target = source // count, target // count

    def ring(self, ranks: Sequence[int]) -> list[Port]:
        """The ports that an all-reduce over the ranks passes."""
        return sorted({port for pair in _ring(ranks) for port in self.path(*pair)})

    def rate(self, port: Port) -> float:
        """Bytes per second that the port lets through."""
        link = self.links[port.level - 1]
        if link.bandwidth is not None:
            return link.bandwidth
        (fewer, sooner), (more, later) = link.points[-2:]
        return (more - fewer) / max(later - sooner, 1e-12)


def _at_once(links: Sequence[Link], seconds: Sequence[float], wait: float) -> Transfer:
    """Through the first links, each for so many seconds: the slowest sets the pace."""
    slowest = seconds.index(max(seconds))
    taken = seconds[slowest]
    return Transfer(taken, wait, links[slowest].busy * (taken + wait))


def _ring(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    ordered = sorted(ranks)
    if len(ordered) > 1:
        yield from zip(ordered, [*ordered[1:], ordered[0]], strict=True)


def latency(link: Link) -> float:
    """Seconds of an almost empty message."""
    return link.points[0][1] if link.points else link.latency


@lru_cache(maxsize=100_000)
def _occupied(link: Link, amount: float) -> float:
    """Seconds for which a message occupies the link: all but the latency."""
    return max(0.0, float(link.seconds(amount)) - latency(link))

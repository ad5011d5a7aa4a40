"""The network of a cluster: how long a message takes, and which messages queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from pipedream.graph.cluster import Cluster, Link


class _Port(NamedTuple):
    """Where a component of `level` - 1 (0: a device) sends to or receives from its neighbours.

    `component` counts all such components of the cluster. Ports are full duplex: what goes out does
    not wait for what comes in.
    """

    level: int
    component: int
    out: bool


class Network:
    """Carries messages, which must be sent in the order of time.

    Two ranks meet at the lowest level at which both are in one component. A message between them
    leaves through the ports of every component around its source below that level, and enters
    through those around its target. It starts when all of these are free and occupies each for as
    long as the link of its level takes for its bytes, without latency. It arrives when the slowest
    port has let it through and the latency of the level where the ranks meet has passed. So
    messages that share a port queue.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.taken_until: dict[_Port, float] = {}
        levels = range(1, len(cluster.machines) + 1)
        self.links = [cluster.link(level) for level in levels]
        self.ring_links = [cluster.ring_link(level) for level in levels]

    def send(self, now: float, source: int, target: int, amount: float) -> float:
        """The time at which `amount` bytes that `source` sends now arrive at `target`."""
        ports = list(self._path(source, target))
        occupied = [_occupied(self.links[port.level - 1], amount) for port in ports]
        return self._pass(now, ports, occupied) + _latency(
            self.links[self.meet(source, target) - 1]
        )

    def all_reduce(self, now: float, ranks: Sequence[int], amount: float) -> float:
        """The time at which all `ranks`, which begin now, have the sum of their `amount` bytes.

        A ring of m ranks (Patarasuk and Yuan, 2009): 2 (m - 1) steps, each sending an m-th of the
        bytes to the next rank.
        """
        count = len(ranks)
        if count == 1:
            return now
        ring = sorted(ranks)
        pairs = list(zip(ring, [*ring[1:], ring[0]], strict=True))
        ports = sorted({port for pair in pairs for port in self._path(*pair)})
        latency = max(_latency(self.ring_links[self.meet(*pair) - 1]) for pair in pairs)
        steps = 2 * (count - 1)
        part = amount / count
        occupied = [steps * _occupied(self.ring_links[port.level - 1], part) for port in ports]
        return self._pass(now, ports, occupied) + steps * latency

    def meet(self, one: int, other: int) -> int:
        """The lowest level at which both ranks are in one component, 1 the innermost."""
        assert one != other
        for level, count in enumerate(self.cluster.machines, start=1):
            one, other = one // count, other // count
            if one == other:
                return level
        raise AssertionError("a rank outside the cluster")

    def _path(self, source: int, target: int) -> Iterator[_Port]:
        for level in range(1, self.meet(source, target) + 1):
            yield _Port(level, source, True)
            yield _Port(level, target, False)
            count = self.cluster.machines[level - 1]
            source, target = source // count, target // count

    def _pass(self, now: float, ports: Sequence[_Port], occupied: Sequence[float]) -> float:
        """Occupies each port for its seconds, once all are free; returns when the last is done."""
        begin = max([now, *(self.taken_until.get(port, 0.0) for port in ports)])
        for port, seconds in zip(ports, occupied, strict=True):
            self.taken_until[port] = begin + seconds
        return begin + max(occupied)


def _latency(link: Link) -> float:
    """Seconds of an almost empty message."""
    return link.points[0][1] if link.points else link.latency


@lru_cache(maxsize=100_000)
def _occupied(link: Link, amount: float) -> float:
    """Seconds for which a message occupies the link: all but the latency."""
    return max(0.0, float(link.seconds(amount)) - _latency(link))

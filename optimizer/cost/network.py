"""The links of a cluster: how long a message takes, and what waits for what."""

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
    """Messages in the order in which they were sent.

    Two ranks meet at the lowest level at which both are in one component. A message between them
    leaves through the ports of every component around its source below that level, and enters
    through those around its target. It sets out when all of them are free, holds each for as long
    as the link of its level takes for so many bytes, latency aside, and has arrived when the
    slowest has let it through and the latency of the level where they meet has passed. So messages
    that share a port queue.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.taken_until: dict[_Port, float] = {}
        levels = range(1, len(cluster.machines) + 1)
        self.links = [cluster.link(level) for level in levels]
        self.ring_links = [cluster.ring_link(level) for level in levels]

    def send(self, now: float, source: int, target: int, amount: float) -> float:
        """When `amount` bytes that `source` sends now have arrived at `target`."""
        ports = list(self._path(source, target))
        held = [_held(self.links[port.level - 1], amount) for port in ports]
        return self._pass(now, ports, held) + _latency(self.links[self.meet(source, target) - 1])

    def all_reduce(self, now: float, ranks: Sequence[int], amount: float) -> float:
        """When all `ranks`, which come to it now, have the sum of their `amount` bytes.

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
        held = [steps * _held(self.ring_links[port.level - 1], part) for port in ports]
        return self._pass(now, ports, held) + steps * latency

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

    def _pass(self, now: float, ports: Sequence[_Port], held: Sequence[float]) -> float:
        """Holds each port for its seconds, from when all of them are free; when the last is."""
        begin = max([now, *(self.taken_until.get(port, 0.0) for port in ports)])
        for port, seconds in zip(ports, held, strict=True):
            self.taken_until[port] = begin + seconds
        return begin + max(held)


def _latency(link: Link) -> float:
    """What a message of next to nothing takes."""
    return link.points[0][1] if link.points else link.latency


@lru_cache(maxsize=100_000)
def _held(link: Link, amount: float) -> float:
    """For how long a message keeps others from the link: all that it takes but the latency."""
    return max(0.0, float(link.seconds(amount)) - _latency(link))

"""The links of a cluster: how long a message takes, and what waits for what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipedream.graph.cluster import Cluster


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
    through those around its target. It sets out when all of them are free, holds each for its bytes
    over the bandwidth of that port's level, and has arrived when the slowest has let it through and
    the latency of the level where they meet has passed. So messages that share a port queue.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.latency = getattr(cluster, "latency", None) or (0.0,) * len(cluster.machines)
        self.taken_until: dict[_Port, float] = {}

    def send(self, now: float, source: int, target: int, amount: float) -> float:
        """When `amount` bytes that `source` sends now have arrived at `target`."""
        ports = list(self._path(source, target))
        return self._pass(now, ports, amount) + self.latency[self.meet(source, target) - 1]

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
        latency = max(self.latency[self.meet(*pair) - 1] for pair in pairs)
        steps = 2 * (count - 1)
        return self._pass(now, ports, steps * amount / count) + steps * latency

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

    def _pass(self, now: float, ports: Sequence[_Port], amount: float) -> float:
        begin = max([now, *(self.taken_until.get(port, 0.0) for port in ports)])
        for port in ports:
            self.taken_until[port] = begin + amount / self.cluster.bandwidth[port.level - 1]
        return max(self.taken_until[port] for port in ports)

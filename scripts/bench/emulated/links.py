"""Do the emulated links carry what they should? `python scripts/bench/emulated/links.py`.

Streams of TCP between devices, and all-reduces of gloo alone and beside them, on the network of
network.py. Prints for each case what the streams carry, as shares of the rate of a port, and how
long an all-reduce takes, beside its ideal 2 (m - 1) / m bytes / rate. Needs root.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from forked import run_ranks
from network import PORT, EmulatedNetwork

from pipedream.graph.cluster import Cluster
from pipedream.graph.units import parse_bytes, show_bytes, show_seconds

READY, WARM_UP, SECONDS, SECONDS_LIMIT = 1.5, 1.5, 5.0, 60.0
STREAM_PORT, STORE_PORT = 7000, 7001
SHOWN = 5
"""Streams that are listed one by one."""


@dataclass(frozen=True)
class LinkTest:
    """Streams, as pairs of devices, and all-reduces of `size` bytes over the first `ring` of them.

    `duplex`: pairs with a stream each way on one connection, as gloo has.
    """

    name: str
    devices: int
    streams: Sequence[tuple[int, int]] = ()
    ring: int = 0
    size: int = 0
    duplex: Sequence[tuple[int, int]] = ()


def tests() -> list[LinkTest]:
    """Streams, rings alone, rings beside a stream that shares a port with one of their links."""
    into = [(other, 0) for other in range(1, 5)]
    found = [
        LinkTest("one stream", 2, [(0, 1)]),
        LinkTest("two streams of a pair", 2, [(0, 1), (0, 1)]),
        LinkTest("one stream and one back", 2, [(0, 1), (1, 0)]),
        LinkTest("each way", 2, duplex=[(0, 1)]),
        LinkTest("each way, one into one", 3, [(2, 0)], duplex=[(1, 0)]),
        LinkTest("each way, three into one", 5, [*into[1:]], duplex=[(1, 0)]),
        LinkTest("each way, all to all", 6, duplex=[(a, b) for a in range(6) for b in range(a)]),
        LinkTest("four into one", 5, into),
        LinkTest("four into one, and out", 5, [*into, *(pair[::-1] for pair in into)]),
        LinkTest("seven into one", 8, [(other, 0) for other in range(1, 8)]),
        LinkTest("all to all of 8", 8, [(a, b) for a in range(8) for b in range(8) if a != b]),
    ]
    sizes = (64, 100_000, 1_000_000, 4_000_000)
    for members in (2, 4, 8, 16):
        found += [LinkTest(f"ring of {members}", members, (), members, size) for size in sizes]
    for members in (4, 8):
        stream = [(members, 0)]
        for size in sizes[:3]:
            found.append(
                LinkTest(f"ring of {members}, a stream", members + 1, stream, members, size)
            )
    return found


def measure(test: LinkTest, rate: float) -> tuple[list[dict[str, Any]], float]:
    """What each device has found, and how many cores they kept busy."""
    cluster = Cluster(machines=(test.devices,), bandwidth=(rate,))
    with tempfile.TemporaryDirectory() as text, closing(EmulatedNetwork(cluster)) as network:
        folder = Path(text)
        body = partial(device, test, network, folder, time.monotonic() + READY)
        ended = run_ranks(test.devices, body, folder, SECONDS_LIMIT)
        if any(ended.codes):
            raise click.ClickException("".join(p.read_text() for p in folder.glob("*.log")))
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(test.devices)]
    return found, ended.cpu_seconds / ended.seconds


def words(test: LinkTest, found: Sequence[dict[str, Any]], rate: float) -> Iterator[str]:
    """What was measured, for people."""
    shares = {
        f"{source}>{target}": carried / rate
        for target, each in enumerate(found)
        for source, carried in each["streams"].items()
    }
    if len(shares) > SHOWN:
        least, most = min(shares.values()), max(shares.values())
        yield f"{len(shares)} streams of {least:.1%} to {most:.1%}"
    else:
        yield from (f"{way} {share:.1%}" for way, share in shares.items())
    if test.ring:
        took = max(statistics.median(each["rings"]) for each in found if each["rings"])
        ideal = 2 * (test.ring - 1) / test.ring * test.size / rate
        yield f"{show_bytes(test.size)} in {show_seconds(took)}, ideal {show_seconds(ideal)}"
        yield f"{took / ideal:.2f} of it"


def device(test: LinkTest, network: EmulatedNetwork, folder: Path, begin: float, rank: int) -> None:
    """What one device does from `begin` on: streams all the time, all-reduces once these flow."""
    network.enter(rank)
    streams = Streams(test, network, rank)
    _sleep_until(begin)
    streams.connect()
    rings: list[float] = []
    adding = threading.Thread(target=_add_up, args=(test, network, rank, begin, rings))
    if rank < test.ring:
        adding.start()
    _sleep_until(begin + WARM_UP)
    before, since = streams.bytes.copy(), time.monotonic()
    _sleep_until(begin + WARM_UP + SECONDS)
    taken = time.monotonic() - since
    carried = {s: (count - before[s]) / taken for s, count in streams.bytes.items()}
    if rank < test.ring:
        adding.join()
    else:
        time.sleep(1.0)  # the streams go on while others finish
    (folder / f"{rank}.json").write_text(json.dumps({"streams": carried, "rings": rings}))
    os._exit(0)  # without waiting for the streams


class Streams:
    """The streams that begin or end at a device. `bytes`: received so far, by their source."""

    def __init__(self, test: LinkTest, network: EmulatedNetwork, rank: int) -> None:
        self.test, self.network, self.rank = test, network, rank
        self.bytes: Counter[int] = Counter()
        self.listener = socket.create_server((network.address(rank), STREAM_PORT), backlog=64)
        _begin(self._accept)

    def connect(self) -> None:
        """Opens the connections of which this device is the source."""
        for source, target in [*self.test.streams, *self.test.duplex]:
            if source == self.rank:
                peer = self.network.address(target), STREAM_PORT
                self._use(socket.create_connection(peer), source, target)

    def _accept(self) -> None:
        ranks = {self.network.address(rank): rank for rank in range(self.test.devices)}
        while True:
            connection, (address, _) = self.listener.accept()
            self._use(connection, ranks[address], self.rank)

    def _use(self, connection: socket.socket, source: int, target: int) -> None:
        both = (source, target) in self.test.duplex
        if self.rank == source or both:
            _begin(_push, connection)
        if self.rank == target or both:
            _begin(self._drain, connection, target if self.rank == source else source)

    def _drain(self, connection: socket.socket, source: int) -> None:
        while got := connection.recv(1 << 20):
            self.bytes[source] += len(got)


def _push(connection: socket.socket) -> None:
    data = bytes(1 << 18)
    with suppress(OSError):
        while True:
            connection.sendall(data)


def _begin(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()


def _add_up(
    test: LinkTest, network: EmulatedNetwork, rank: int, begin: float, seconds: list[float]
) -> None:
    """All-reduces until the time is up on some rank, which each of them tells: their seconds."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = PORT
    store = f"tcp://{network.address(0)}:{STORE_PORT}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=test.ring)
    _sleep_until(begin + WARM_UP)
    numbers = torch.zeros(test.size // 4)
    while not numbers[0]:
        numbers[0] = time.monotonic() > begin + WARM_UP + SECONDS
        since = time.monotonic()
        dist.all_reduce(numbers)
        seconds.append(time.monotonic() - since)
    dist.destroy_process_group()


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


@click.command()
@click.option("--rate", default="2.5MB", help="Bytes per second of each port.")
@click.option("--only", default="", help="Cases whose names begin so.")
def main(rate: str, only: str) -> None:
    """Measures the emulated links."""
    for test in tests():
        if test.name.startswith(only):
            found, cores = measure(test, parse_bytes(rate))
            said = ", ".join(words(test, found, parse_bytes(rate)))
            click.echo(f"{test.name:26} {said}; cores {cores:.2f}")


if __name__ == "__main__":
    main()

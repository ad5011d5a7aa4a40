"""What the actions of a program send over a cluster: sizes, streams and the ports they share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain

import numpy as np

from pipedream.optimizer.cost.network import Network, Port, Transfer
from pipedream.optimizer.cuts.planning_graph import Floats, Ints
from pipedream.optimizer.simulate.links import Streams
from pipedream.optimizer.simulate.play import Items, Sums
from pipedream.optimizer.simulate.program import WHOLE, Program
from pipedream.optimizer.simulate.sums import PassWithSums
from pipedream.optimizer.simulate.workload import Workload

_NORM_BYTES = 8.0
"""Of the number that the ranks add up to find the norm of the whole model's gradient."""


class Traffic:
    """The messages and sums of a program, whose worker (s, r) is on rank `ranks[s][r]`, and the
    streams that they go through, each known by the ranks at its ends or of its ring.
    """

    def __init__(
        self,
        program: Program,
        workload: Workload,
        network: Network,
        ranks: Sequence[Sequence[int]],
    ) -> None:
        self.program, self.workload, self.network, self.ranks = program, workload, network, ranks
        self.ports: dict[Port, int] = {}
        self.paths: list[list[int]] = []
        self.rates: list[float] = []
        self.known: dict[tuple[int, ...], int] = {}

    def played(
        self, numbers: Sequence[int], closing: Mapping[int, PassWithSums]
    ) -> tuple[Items, Sums, Streams]:
        """All that goes through the streams; `numbers`: the ranks in the order of the program;
        `closing`: the last backward pass of each stage that has sums.
        """
        messages = self._messages(numbers)
        sums, parts = self._sums(closing)
        stream, size, latency, busy = (
            np.concatenate(pair) for pair in zip(messages[:4], parts, strict=True)
        )
        return Items(stream, size, latency, busy, messages[4]), sums, self._streams()

    def _between(self, source: int, target: int, forwards: int) -> int:
        """Activations and gradients are apart, as in comm/transport.py."""
        key = source, target, forwards
        return self._stream(key, lambda: self.network.path(source, target))

    def _ring(self, stage: int, ranks: Sequence[int]) -> int:
        return self._stream((-1, stage), lambda: self.network.ring(ranks))

    def _stream(self, key, ports) -> int:  # type: ignore[no-untyped-def]
        if key not in self.known:
            passed = list(ports())
            self.known[key] = len(self.paths)
            self.paths.append([self.ports.setdefault(port, len(self.ports)) for port in passed])
            self.rates.append(min(self.network.rate(port) for port in passed))
        return self.known[key]

    def _item(self, stream: int, transfer: Transfer) -> tuple[int, float, float, float]:
        """The stream, bytes that take the transfer's seconds when it is alone, latency, and busy
        seconds.
        """
        return stream, transfer.seconds * self.rates[stream], transfer.latency, transfer.busy

    def _streams(self) -> Streams:
        users: list[list[int]] = [[] for _ in self.ports]
        for stream, path in enumerate(self.paths):
            for port in path:
                users[port].append(stream)
        rate = np.array([self.network.rate(port) for port in self.ports])
        return Streams(*_rows(self.paths), *_rows(users), rate)

    def _messages(self, numbers: Sequence[int]) -> tuple[Ints, Floats, Floats, Floats, Ints]:
        """Returns stream, bytes, latency, busy seconds and receiving rank of each message."""
        place = {rank: number for number, rank in enumerate(numbers)}
        program = self.program
        rank_of = np.array([self.ranks[stage][replica] for stage, replica in program.workers])
        keys = np.stack([program.link, program.forwards, program.source, program.target])
        distinct, which = np.unique(keys, axis=1, return_inverse=True)
        links = sorted(self.workload.forward_bytes)
        rows = []
        for link, forwards, source, target in distinct.T.tolist():
            here, there = int(rank_of[source]), int(rank_of[target])
            if here == there:
                rows.append((-1, 0.0, 0.0, 0.0, place[there]))
                continue
            sizes = self.workload.forward_bytes if forwards else self.workload.backward_bytes
            transfer = self.network.message(here, there, sizes[links[link]])
            stream = self._between(here, there, forwards)
            rows.append((*self._item(stream, transfer), place[there]))
        stream, size, latency, busy, receiver = _columns(rows, 5)[:, which.reshape(-1)]
        return stream.astype(np.int64), size, latency, busy, receiver.astype(np.int64)

    def _sums(
        self, closing: Mapping[int, PassWithSums]
    ) -> tuple[Sums, tuple[Ints, Floats, Floats, Floats]]:
        """Returns the sums, and stream, bytes, latency and busy seconds of each of their parts."""
        program, sums = self.program, [stage.sums for stage in self.workload.stages]
        of_stage = {
            stage: [
                self._part(stage, amount, begins, self.ranks[stage])
                for (amount, _), begins in zip(sums[stage], passed.begins, strict=True)
            ]
            for stage, passed in closing.items()
        }
        if WHOLE in program.stage:
            every = sorted({rank for own in self.ranks for rank in own})
            of_stage[WHOLE] = [self._part(WHOLE, _NORM_BYTES, 1.0, every)]
        parts = [of_stage[stage] for stage in program.stage.tolist()]
        columns = _columns(list(chain.from_iterable(parts)), 5)
        first = np.array(list(accumulate(map(len, parts), initial=0)), dtype=np.int64)
        count = {WHOLE: len(program.workers), **dict(enumerate(map(len, self.ranks)))}
        members = np.array([count[stage] for stage in program.stage.tolist()], dtype=np.int64)
        number = np.repeat(np.arange(len(parts)), np.diff(first))
        # A column lies in memory otherwise than an array: the kernels would be compiled for both.
        stream, size, latency, busy, begins = map(np.ascontiguousarray, columns)
        found = Sums(len(program.link) + first, members, number, begins)
        return found, (stream.astype(np.int64), size, latency, busy)

    def _part(
        self, stage: int, amount: float, begins: float, ranks: Sequence[int]
    ) -> tuple[int, float, float, float, float]:
        """Returns the item of a part, and when in the pass it begins."""
        if len(ranks) == 1:
            return -1, 0.0, 0.0, 0.0, begins
        transfer = self.network.all_reduce(ranks, amount)
        return *self._item(self._ring(stage, ranks), transfer), begins


def _rows(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Returns where each row begins, with the end of the last, and all rows in one."""
    first = np.array(list(accumulate(map(len, rows), initial=0)), dtype=np.int64)
    return first, np.array(list(chain.from_iterable(rows)), dtype=np.int64)


def _columns(rows: Iterable[Sequence[float]], count: int) -> Floats:
    return np.array(list(rows), dtype=np.float64).reshape(-1, count).T

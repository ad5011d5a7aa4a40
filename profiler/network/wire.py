"""Messages and sums between ranks, sent the way in which pd-train sends them.

A receive is posted ahead; with gloo a send is begun by another thread, since gloo copies the
message to the network in the call that sends it, and tensors of a GPU go through page-locked host
memory. That thread takes as long as a small message itself, so it belongs to what is measured. With
NCCL each way between two ranks has a group of its own. A sum of many bytes is begun in buckets, all
of them before the first is waited for. See comm/transport.py and comm/buckets.py, which the
profiler may not import.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from pipedream.comm.buckets import BUCKET_BYTES
from pipedream.profiler.network.levels import Ranks

Wait = Callable[[], None]
"""Returns when what was begun is done. Raises Lost."""


class Lost(RuntimeError):
    """Another rank does not answer any more."""


class Wire:
    """The connections of one rank. Made by all ranks at once, with the same pairs and groups."""

    def __init__(
        self, device: torch.device, backend: str, pairs: Sequence[Ranks], groups: Sequence[Ranks]
    ) -> None:
        self.device = device
        self.staged = device if backend == "nccl" else torch.device("cpu")
        self.sends = _Sends(self.staged, aside=backend != "nccl")
        self.ways: dict[Ranks, dist.ProcessGroup] = {}
        with talking():
            if backend == "nccl":
                both = [way for pair in pairs for way in (pair, pair[::-1])]
                self.ways = {way: dist.new_group(sorted(way)) for way in both}
            self.groups = {ranks: dist.new_group(list(ranks)) for ranks in groups}

    def tensor(self, size: int) -> Tensor:
        """Of so many bytes, where the compute has its tensors."""
        return torch.zeros(size // 4, device=self.device)

    def room(self, size: int) -> Tensor:
        """For a message of so many bytes that is to come."""
        pinned = self.staged != self.device
        return torch.empty(size // 4, device=self.staged, pin_memory=pinned)

    def send(self, tensor: Tensor, peer: int) -> None:
        """Sends and returns at once; the tensor must stay as it is until the peer has it."""
        self.sends.put((tensor.to(self.staged), peer, self.ways.get((dist.get_rank(), peer))))

    def post(self, room: Tensor, peer: int) -> Wait:
        """Begins to receive; what waits has the message on the device."""
        with talking():
            arrived = _waiter(dist.irecv(room, peer, self.ways.get((peer, dist.get_rank()))))

        def wait() -> None:
            arrived()
            room.to(self.device)

        return wait

    def add_up(self, flat: Tensor, group: Ranks) -> Wait:
        """Begins to replace a tensor by its sum over the ranks of a group."""
        parts = []
        with talking():
            for part in torch.split(flat, BUCKET_BYTES // 4):
                staged = part.to(self.staged)
                work = dist.all_reduce(staged, group=self.groups[group], async_op=True)
                parts.append((part, staged, _waiter(work)))

        def wait() -> None:
            for part, staged, added in parts:
                added()
                if staged is not part:
                    part.copy_(staged)

        return wait

    def finish(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Waits until all is sent. Raises Lost."""
        self.sends.close()

    def tell(self, numbers: Sequence[float], source: int) -> list[float]:
        """The numbers of the rank `source` on every rank, which gives as many; all wait for it."""
        told = torch.tensor(numbers, dtype=torch.float64, device=self.staged)
        with talking():
            dist.broadcast(told, source)
        return [float(number) for number in told.tolist()]


@contextmanager
def talking() -> Iterator[None]:
    """In here no error is ours: if anything goes wrong another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).strip() or "no message").splitlines()[0]
        raise Lost(f"another rank does not answer any more: {reason}") from error


_Send: TypeAlias = tuple[Tensor, int, dist.ProcessGroup | None]


class _Sends:
    """Sends in the order given. With `aside` a thread does it; another waits until each is out."""

    def __init__(self, device: torch.device, aside: bool) -> None:
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.failure: Lost | None = None
        self.waiting: queue.SimpleQueue[_Send | None] = queue.SimpleQueue()
        self.outgoing: queue.SimpleQueue[tuple[Wait, Tensor] | None] = queue.SimpleQueue()
        self.threads = [threading.Thread(target=self._reap, name="sent", daemon=True)]
        if aside:
            self.threads.append(threading.Thread(target=self._send_all, name="sends", daemon=True))
        self.aside = aside
        for thread in self.threads:
            thread.start()

    def put(self, send: _Send) -> None:
        if self.failure is not None:
            raise self.failure
        if self.aside:
            self.waiting.put(send)
        else:
            self._send(*send)

    def close(self) -> None:
        (self.waiting if self.aside else self.outgoing).put(None)
        for thread in self.threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def _send_all(self) -> None:
        try:
            while (send := self.waiting.get()) is not None:
                self._send(*send)
        except Lost as error:
            self.failure = error
        self.outgoing.put(None)

    def _send(self, message: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
        with talking():
            self.outgoing.put((_waiter(dist.isend(message, peer, group)), message))

    def _reap(self) -> None:
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            try:
                while (sent := self.outgoing.get()) is not None:
                    sent[0]()
                    if self.stream is not None:
                        self.stream.synchronize()
            except Lost as error:
                self.failure = error


def _waiter(work: dist.Work | None) -> Wait:
    assert work is not None

    def wait() -> None:
        with talking():
            work.wait()

    return wait

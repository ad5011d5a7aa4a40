"""A backend of torch.distributed on the CPU that orders operations as NCCL does.

A communicator does its operations one after the other, in a thread (its stream), each by gloo: a
send ends when the peer has come to the receive, a sum when all ranks have come to it. Who begins
one goes on at once, but for the first between two ranks, and the first sum: that connects them, and
blocks whoever begins it until the others begin it, too. With `streams`, so many are dealt out to
the communicators of a rank in turn, as torch deals out 32.

`install` has the ranks that this process forks believe that this is NCCL.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

_LOOKS, _HANGS = 0.002, 30.0  # seconds


class Stream:
    """Does operations in the order in which they are put on it."""

    def __init__(self) -> None:
        self.operations: queue.SimpleQueue[Operation] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self.operations.get().do()


class Operation(dist._Work):
    """What is waited for."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        self.run, self.error, self.ended = run, None, threading.Event()

    def do(self) -> None:
        try:
            self.run()
        except RuntimeError as error:  # a rank is gone
            self.error = error
        self.ended.set()

    def wait(self, timeout: Any = None) -> bool:
        if not self.ended.wait(_HANGS):
            raise RuntimeError("it hangs")
        if self.error is not None:
            raise RuntimeError(str(self.error))
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


class Rank:
    """The streams of this process, and its `begun`: (ranks of the communicator, kind, pairs)."""

    streams: Sequence[Stream] = ()
    most: int | None = None
    made = 0
    begun: ClassVar[list[tuple[tuple[int, ...], str, tuple[Any, ...]]]] = []

    @classmethod
    def stream(cls) -> Stream:
        cls.made += 1
        if cls.most is None or len(cls.streams) < cls.most:
            cls.streams = (*cls.streams, Stream())
            return cls.streams[-1]
        return cls.streams[(cls.made - 1) % cls.most]


class Strict(dist.ProcessGroup):
    """A communicator."""

    def __init__(self, options: Any) -> None:
        here, size = options.group_rank, options.group_size
        super().__init__(here, size)
        self.here, self.ranks = here, list(options.global_ranks_in_group) or list(range(size))
        store = options.store
        self.gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", store), here, size, timedelta(seconds=100)
        )
        self.store, self.connected = dist.PrefixStore("connected", store), set[Any]()
        self.stream = Rank.stream()

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Operation:
        return self._begin("send", [(self.here, peer)], lambda: self._send(tensors, peer).wait())

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Operation:
        return self._begin("recv", [(peer, self.here)], lambda: self._recv(tensors, peer).wait())

    def batch(self, messages: Sequence[dist.P2POp]) -> Operation:
        """As between ncclGroupStart and ncclGroupEnd."""
        pairs = [
            (self.here, m.group_peer) if m.op is dist.isend else (m.group_peer, self.here)
            for m in messages
        ]

        def run() -> None:
            works = [
                (self._send if m.op is dist.isend else self._recv)([m.tensor], m.group_peer)
                for m in messages
            ]
            for work in works:
                work.wait()

        return self._begin("batch", pairs, run)

    def _send(self, tensors: Any, peer: int) -> Any:
        return self.gloo.send(tensors, peer, 0)

    def _recv(self, tensors: Any, peer: int) -> Any:
        return self.gloo.recv(tensors, peer, 0)

    def allreduce(self, tensors: Any, opts: Any = None) -> Operation:
        return self._begin("sum", [], lambda: self.gloo.allreduce(tensors, opts).wait())

    def broadcast(self, tensors: Any, opts: Any = None) -> Operation:
        return self._begin("broadcast", [], lambda: self.gloo.broadcast(tensors, opts).wait())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Operation:
        return self._begin("gather", [], lambda: self.gloo.allgather(outputs, inputs).wait())

    def all_gather_single(self, output: Any, own: Any, opts: Any = None) -> Operation:
        return self._begin("gather", [], lambda: self.gloo._allgather_base(output, own).wait())

    def reduce_scatter_single(self, own: Any, all_of_it: Any, opts: Any = None) -> Operation:
        return self._begin(
            "scatter", [], lambda: self.gloo._reduce_scatter_base(own, all_of_it).wait()
        )

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: Any = None) -> Operation:
        return self._begin("barrier", [], lambda: self.gloo.barrier().wait())

    def getBackendName(self) -> str:  # noqa: N802
        return "strict"

    def _begin(
        self, kind: str, pairs: Sequence[tuple[int, int]], run: Callable[[], None]
    ) -> Operation:
        named = tuple((self.ranks[one], self.ranks[other]) for one, other in pairs)
        Rank.begun.append((tuple(self.ranks), kind, named))
        self._connect(named or [tuple(self.ranks)])
        operation = Operation(run)
        self.stream.operations.put(operation)
        return operation

    def _connect(self, every: Iterable[tuple[int, ...]]) -> None:
        """Waits until all ends are here; comes to all of them at once."""
        fresh = set(every) - self.connected
        for ends in fresh:
            self.store.set(f"{ends}/{self.ranks[self.here]}", "")
        limit = time.monotonic() + _HANGS
        for ends in fresh:
            while not self.store.check([f"{ends}/{rank}" for rank in ends]):
                if time.monotonic() > limit:
                    raise RuntimeError(f"hangs where it connects {ends}")
                time.sleep(_LOOKS)
        self.connected |= fresh


def install(streams: int | None = None) -> None:
    """In a process that is then forked into ranks."""
    from pipedream.runtime import pipeline
    from pipedream.runtime.local import local_model

    dist.Backend.register_backend(
        "strict", lambda options, _: Strict(options), extended_api=True, devices=["cpu"]
    )
    init, backend_of = dist.init_process_group, dist.get_backend

    def init_process_group(backend: str, **options: Any) -> None:
        Rank.streams, Rank.most, Rank.made, Rank.begun = (), streams, 0, []
        options.pop("device_id", None)
        init("strict", **options)

    def get_backend(group: Any = None) -> str:
        known = backend_of(group)
        return "nccl" if known == "strict" else known

    def batch(messages: Sequence[dist.P2POp]) -> list[Operation]:
        group = messages[0].group or dist.group.WORLD
        return [group.batch(messages)]

    dist.init_process_group, dist.get_backend = init_process_group, get_backend  # type: ignore[assignment]
    dist.batch_isend_irecv = batch  # type: ignore[assignment]
    dist.is_nccl_available = lambda: False
    torch.cuda.nccl.version = lambda: (0, 0)  # asked for by torch's checkpoints
    for module in (local_model, pipeline):
        module.choose_device = lambda name, info: (torch.device("cpu"), "nccl")

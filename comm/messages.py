"""How messages between ranks are begun, and their tensors kept until they are there.

gloo tells messages apart by tags, and copies one to the network in the call that sends it; NCCL
only enqueues them, on the queue that each communicator has.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from pipedream.comm.device.threads import start_thread
from pipedream.schedule.channel import Channel, TeamLink

Message: TypeAlias = list[torch.Tensor]
Parts: TypeAlias = Mapping[Channel, Message]
"""One message between two workers: what goes from a device of the one to a device of the other."""

Works: TypeAlias = Mapping[Channel, list[Any]]
"""What to wait for, by channel; for those of one message together it may stand with the first."""

TeamLinks: TypeAlias = Mapping[TeamLink, dist.ProcessGroup]


class PeerLost(RuntimeError):
    """Another rank no longer answers; `peer` is its rank, if known."""

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


@contextmanager
def lost(message: str, peer: int | None = None) -> Iterator[None]:
    """Raises PeerLost where torch.distributed reports an error."""
    try:
        yield
    except PeerLost:
        raise
    except RuntimeError as error:
        raise PeerLost(message, peer) from error


def begin_messages(
    group: dist.ProcessGroup,
    outgoing: Iterable[tuple[int, torch.Tensor]],
    incoming: Iterable[tuple[int, torch.Tensor]],
) -> list[Any]:
    """Begins to send tensors to ranks, and to receive them, as one operation of the group with
    NCCL; returns what to wait for.
    """
    operations = [dist.P2POp(dist.isend, tensor, peer, group) for peer, tensor in outgoing]
    operations += [dist.P2POp(dist.irecv, tensor, peer, group) for peer, tensor in incoming]
    return dist.batch_isend_irecv(operations) if operations else []


class Messages(Protocol):
    """The messages of a rank, in the order in which they are given."""

    def send(self, parts: Parts) -> None:
        """Begins to send, or will soon. Raises PeerLost if an earlier message has failed."""

    def receive(self, parts: Parts) -> Future[Works]:
        """As `send`; returns what to wait for, there once it has begun."""

    def drain(self) -> None:
        """Waits until every message that was sent has arrived. Raises PeerLost."""


class QueuedMessages:
    """With NCCL, which does the operations of a communicator one after the other: a send would wait
    for a receive that was posted ahead. So each way between two workers has a communicator of its
    own. It knows no tags: messages of several links that share a way have one order, which the
    checker proves.

    What was sent is kept until the device has sent it, so that its memory stays: looked at with the
    next message, since a thread that waits would have the GPU wait on a stream more.
    """

    def __init__(self, links: TeamLinks, device: torch.device) -> None:
        self.links, self.device = links, device
        self.sent: deque[tuple[list[Any], Parts]] = deque()

    def send(self, parts: Parts) -> None:
        while self.sent and all(work.is_completed() for work in self.sent[0][0]):
            self.sent.popleft()
        tensors = [(c.target, tensor) for c, message in parts.items() for tensor in message]
        peer = next(iter(parts)).target
        with lost(f"cannot send to rank {peer}", peer):
            self.sent.append((begin_messages(self._group(parts), tensors, ()), parts))

    def receive(self, parts: Parts) -> Future[Works]:
        tensors = [(c.source, tensor) for c, message in parts.items() for tensor in message]
        peer = next(iter(parts)).source
        begun: Future[Works] = Future()
        with lost(f"cannot receive from rank {peer}", peer):
            works = begin_messages(self._group(parts), (), tensors)
        begun.set_result({channel: [] if n else works for n, channel in enumerate(parts)})
        return begun

    def drain(self) -> None:
        with lost("a message did not arrive"):
            for works, _ in self.sent:
                for work in works:
                    work.wait()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        self.sent.clear()

    def _group(self, parts: Parts) -> dist.ProcessGroup:
        (link,) = {channel.team_link for channel in parts}
        return self.links[link]


class TaggedMessages:
    """With gloo. A thread begins them: both calls wait where gloo is busy with another message of
    the same peer. Another waits for what was sent.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.failure: PeerLost | None = None
        self._start()

    def _start(self) -> None:
        self.waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.outgoing: queue.SimpleQueue[tuple[list[Any], Parts] | None] = queue.SimpleQueue()
        self.threads = [
            start_thread(self._reap, "sent", self.device),
            start_thread(self._begin, "messages", self.device),
        ]

    def send(self, parts: Parts) -> None:
        self._do(lambda: self._send(parts))

    def receive(self, parts: Parts) -> Future[Works]:
        begun: Future[Works] = Future()
        self._do(lambda: self._receive(parts, begun))
        return begun

    def _do(self, begin: Callable[[], None]) -> None:
        if self.failure is not None:
            raise self.failure
        self.waiting.put(begin)

    def drain(self) -> None:
        self.waiting.put(None)
        for thread in self.threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        self._start()

    def _begin(self) -> None:
        """Begins receives in order, after a failure too: who waits for one is told of it."""
        while (begin := self.waiting.get()) is not None:
            try:
                begin()
            except PeerLost as error:
                self.failure = error
        self.outgoing.put(None)

    def _send(self, parts: Parts) -> None:
        if self.failure is not None:
            return
        works = []
        for channel, message in parts.items():
            with lost(f"cannot send to rank {channel.target}", channel.target):
                works += [dist.isend(each, channel.target, tag=channel.tag) for each in message]
        self.outgoing.put((works, parts))

    def _receive(self, parts: Parts, begun: Future[Works]) -> None:
        if self.failure is not None:
            begun.set_exception(self.failure)
            return
        works = {}
        try:
            for channel, message in parts.items():
                source, tag = channel.source, channel.tag
                with lost(f"cannot receive from rank {source}", source):
                    works[channel] = [dist.irecv(each, source, tag=tag) for each in message]
        except PeerLost as error:
            begun.set_exception(error)
            raise
        begun.set_result(works)

    def _reap(self) -> None:
        """Waits for the sends in order, so that their tensors are freed once they are sent."""
        while (sent := self.outgoing.get()) is not None:
            try:
                with lost("a message did not arrive"):
                    for work in sent[0]:
                        work.wait()
            except PeerLost as error:
                self.failure = error
                return
            del sent

"""Tensors between stages: messages along the links of a pipeline, sums over replicas.

All of it runs beside the computation. A receive is posted ahead of the pass that needs it, into
recycled memory; a send owns its tensors until the other side has them. Only the tensors are sent:
both sides know from the plan what comes when. A message without tensors, such as the gradients for
a stage that does not learn, is sent as one byte, so that whoever receives it waits for it: else
that stage would run ahead of all others. gloo carries CPU tensors only, so tensors of a GPU
pass through host memory.

Between two stages of the same rank nothing is sent: the tensors are handed over, detached from the
autograd graph that made them. Neither side writes into them, and their memory is not recycled,
since it belongs to the stage that made them.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist

from pipedream.schedule.channel import Channel, RankLink

Message: TypeAlias = list[torch.Tensor]
_Kind: TypeAlias = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class PeerLost(RuntimeError):
    """Another rank no longer answers; `peer` is its rank, if known."""

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


def connect_group(ranks: Iterable[int]) -> dist.ProcessGroup:
    """Connects the ranks with each other. All ranks of the run call it, in the same order, and
    raise PeerLost if one of `ranks` is gone.
    """
    members = sorted(ranks)
    try:
        group: dist.ProcessGroup = dist.new_group(members)
    except RuntimeError as error:
        raise PeerLost(f"the ranks {members} could not be connected") from error
    return group


def connect_several(ranks: Collection[int]) -> dist.ProcessGroup | None:
    """Does what `connect_group` does; None if there is one rank, which needs no group."""
    return connect_group(ranks) if len(ranks) > 1 else None


class TensorSpec(Protocol):
    """Says what a receive needs to know of a tensor; tensors have it, too."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...


class TensorType(NamedTuple):
    """Holds the shape and type of a tensor that is received."""

    shape: tuple[int, ...]
    dtype: torch.dtype


_NOTHING = TensorType((1,), torch.uint8)
"""What is sent for a message without tensors."""


@dataclass(frozen=True)
class _Arriving:
    """`works`: there once the receive has begun, or PeerLost."""

    buffers: Message
    works: Future[list[Any]]
    empty: bool


def _kind(message: Sequence[TensorSpec]) -> _Kind:
    """Returns shape and type of each tensor: they differ in the last minibatch."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in message)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Returns the type to add up such numbers in."""
    return torch.complex128 if dtype.is_complex else torch.float64


class Transport:
    """The messages of one rank. Made by all ranks at the same time, with the same `rank_links`."""

    def __init__(
        self, device: torch.device, backend: str, rank_links: Iterable[RankLink] = ()
    ) -> None:
        self.device = device
        self.staged = device if backend == "nccl" else torch.device("cpu")
        # NCCL does the operations of a group one after the other: a send would wait for a receive
        # that was posted ahead. So each way has a group of its own. It knows no tags: messages of
        # several links that share a way have one order, which the checker proves.
        self.groups: dict[RankLink, dist.ProcessGroup] = {}
        if backend == "nccl":
            self.groups = {rank_link: connect_group(rank_link[:2]) for rank_link in rank_links}
        self.arriving: dict[Channel, deque[_Arriving]] = {}
        self.handed: dict[Channel, deque[Message]] = {}
        self.spare: dict[tuple[Channel, _Kind], list[Message]] = {}
        self.messages = _Messages(self.groups, self.staged, aside=backend != "nccl")

    def send(self, channel: Channel, tensors: Iterable[torch.Tensor]) -> None:
        """Sends and returns at once. Raises PeerLost if an earlier message could not be sent."""
        if channel.is_local:
            message = [tensor.detach() for tensor in tensors]
            self.handed.setdefault(channel, deque()).append(message)
        else:
            message = [t.detach().to(self.staged).contiguous() for t in tensors]
            self.messages.send(channel, message or [self._buffer(_NOTHING).zero_()])

    def post(self, channel: Channel, values: Sequence[TensorSpec]) -> None:
        """Posts a receive of the next message on the channel, which has these values. Raises
        PeerLost if an earlier message could not be sent or received.
        """
        if channel.is_local:
            return
        spare = self.spare.get((channel, _kind(values)))
        buffers = spare.pop() if spare else [self._buffer(value) for value in values or [_NOTHING]]
        works = self.messages.receive(channel, buffers)
        self.arriving.setdefault(channel, deque()).append(
            _Arriving(buffers, works, empty=not values)
        )

    def _buffer(self, value: TensorSpec) -> torch.Tensor:
        # Page-locked where it goes on to a GPU: such copies are faster.
        through_host = self.staged != self.device
        return torch.empty(
            value.shape, dtype=value.dtype, device=self.staged, pin_memory=through_host
        )

    def receive(self, channel: Channel) -> Message:
        """Waits for the oldest message posted on the channel. Raises PeerLost.

        The tensors may be given back with `recycle` when nobody needs them any more.
        """
        if channel.is_local:
            return self.handed[channel].popleft()
        message = self.arriving[channel].popleft()
        try:
            for work in message.works.result():
                work.wait()
        except PeerLost:
            raise
        except RuntimeError as error:
            raise PeerLost(f"no message from rank {channel.source}", channel.source) from error
        if message.empty:
            return []
        return [buffer.to(self.device).detach() for buffer in message.buffers]

    def recycle(self, channel: Channel, message: Message) -> None:
        """Gives the memory of a message to later ones of the channel with the same shapes."""
        if message and self.staged == self.device and not channel.is_local:
            spare = self.spare.setdefault((channel, _kind(message)), [])
            spare.append([tensor.detach() for tensor in message])

    def add_up(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
        """Replaces each tensor by its sum over the group, with one message per type."""
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            self.begin_sum(flat, group).wait()
            parts = torch.split(flat, [tensor.numel() for tensor in same])
            for tensor, part in zip(same, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def average(self, buffers: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
        """Replaces batch-norm statistics and the like by their mean over the replicas."""
        if group is None or not buffers:
            return
        sums = [buffer.to(_exact(buffer.dtype)) for buffer in buffers]
        self.add_up(sums, group)
        for buffer, sum_ in zip(buffers, sums, strict=True):
            buffer.copy_(sum_ / dist.get_world_size(group))  # counts stay whole numbers

    def begin_sum(self, flat: torch.Tensor, group: dist.ProcessGroup | None) -> Sum:
        """Begins to replace `flat` by its sum over the group. Raises PeerLost."""
        staged = flat.to(self.staged)
        try:
            return Sum(flat, staged, dist.all_reduce(staged, group=group, async_op=True))
        except RuntimeError as error:
            raise PeerLost("a replica of this stage does not answer") from error

    def barrier(self) -> None:
        """Waits until every rank is here. Raises PeerLost."""
        try:
            dist.barrier()
        except RuntimeError as error:
            raise PeerLost("the ranks did not all reach the end of the epoch") from error

    def drain(self) -> None:
        """Waits until every send has arrived. Raises PeerLost."""
        self.messages.drain()


@dataclass(frozen=True)
class Sum:
    """A sum over a group that is under way."""

    flat: torch.Tensor
    staged: torch.Tensor
    work: Any

    def wait(self) -> None:
        """Waits until `flat` has the sum. Raises PeerLost."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise PeerLost("a replica of this stage does not answer") from error
        if self.staged is not self.flat:
            self.flat.copy_(self.staged)


class _Messages:
    """Begins sends and receives in the order given, and keeps the tensors until they are sent.

    With `aside` a thread begins them: gloo copies a message to the network in the call that sends
    it, and both calls wait where it is busy with another message of the same peer. NCCL only
    enqueues them, and needs all of them from one thread. Its sends are waited for on a stream of
    their own, so that the computation need not wait for them.
    """

    def __init__(
        self, groups: Mapping[RankLink, dist.ProcessGroup], device: torch.device, aside: bool
    ) -> None:
        self.groups, self.aside = groups, aside
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.failure: PeerLost | None = None
        self._start()

    def _start(self) -> None:
        self.waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.outgoing: queue.SimpleQueue[tuple[list[Any], Message] | None] = queue.SimpleQueue()
        self.threads = [threading.Thread(target=self._reap, name="sent", daemon=True)]
        if self.aside:
            self.threads.append(threading.Thread(target=self._begin, name="messages", daemon=True))
        for thread in self.threads:
            thread.start()

    def send(self, channel: Channel, message: Message) -> None:
        self._do(lambda: self._send(channel, message))

    def receive(self, channel: Channel, buffers: Message) -> Future[list[Any]]:
        """Returns the works to wait for."""
        works: Future[list[Any]] = Future()
        self._do(lambda: self._receive(channel, buffers, works))
        return works

    def _do(self, begin: Callable[[], None]) -> None:
        if self.failure is not None:
            raise self.failure
        if self.aside:
            self.waiting.put(begin)
        else:
            begin()

    def drain(self) -> None:
        (self.waiting if self.aside else self.outgoing).put(None)
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

    def _send(self, channel: Channel, message: Message) -> None:
        if self.failure is not None:
            return
        group = self.groups.get(channel.rank_link)
        try:
            works = [dist.isend(t, channel.target, group, channel.tag) for t in message]
        except RuntimeError as error:
            raise PeerLost(f"cannot send to rank {channel.target}", channel.target) from error
        self.outgoing.put((works, message))

    def _receive(self, channel: Channel, buffers: Message, works: Future[list[Any]]) -> None:
        if self.failure is not None:
            works.set_exception(self.failure)
            return
        group = self.groups.get(channel.rank_link)
        try:
            works.set_result([dist.irecv(b, channel.source, group, channel.tag) for b in buffers])
        except RuntimeError as error:
            lost = PeerLost(f"cannot receive from rank {channel.source}", channel.source)
            lost.__cause__ = error
            works.set_exception(lost)
            raise lost from error

    def _wait(self, works: Sequence[Any]) -> None:
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            for work in works:
                work.wait()
        if self.stream is not None:
            self.stream.synchronize()

    def _reap(self) -> None:
        """Waits for the sends in order, so that their tensors are freed once they are sent."""
        while (sent := self.outgoing.get()) is not None:
            try:
                self._wait(sent[0])
            except RuntimeError as error:
                self.failure = PeerLost("a message did not arrive")
                self.failure.__cause__ = error
                return
            del sent

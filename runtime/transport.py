"""Tensors between ranks: messages along the links of a pipeline, sums over replicas.

A receive may be posted ahead of the pass that needs it; a send owns its tensors until the other
side has them. gloo carries CPU tensors only, so tensors of a GPU pass through host memory.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipedream.profiler.capture import Value


class PeerLost(RuntimeError):
    """Another rank does not answer any more."""


@dataclass(frozen=True)
class Channel:
    """One direction between two ranks; messages on it arrive in the order they were sent."""

    peer: int
    is_gradient: bool


@dataclass(frozen=True)
class _Arriving:
    buffers: list[torch.Tensor]
    works: list[Any]


class Transport:
    """The messages of one rank."""

    def __init__(self, device: torch.device, backend: str) -> None:
        self.device = device
        self.staged = device if backend == "nccl" else torch.device("cpu")
        # NCCL keeps the order of operations within a group, so each direction has a group of its
        # own: two ranks may both send before either receives.
        self.groups = [dist.new_group() if backend == "nccl" else None for _ in range(2)]
        self.arriving: dict[Channel, deque[_Arriving]] = {}
        self.outgoing: queue.SimpleQueue[tuple[list[Any], list[torch.Tensor]] | None]
        self.outgoing = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self.reaper = threading.Thread(target=self._reap, name="sends", daemon=True)
        self.reaper.start()

    def send(self, channel: Channel, tensors: Iterable[torch.Tensor]) -> None:
        """Sends and returns at once."""
        staged = [tensor.detach().to(self.staged).contiguous() for tensor in tensors]
        group = self.groups[channel.is_gradient]
        try:
            works = [dist.isend(t, channel.peer, group, channel.is_gradient) for t in staged]
        except RuntimeError as error:
            raise PeerLost(f"cannot send to rank {channel.peer}") from error
        self.outgoing.put((works, staged))

    def post(self, channel: Channel, values: Sequence[Value]) -> None:
        """Makes room for the next message on the channel, which holds these values."""
        buffers = [torch.empty(v.shape, dtype=v.dtype, device=self.staged) for v in values]
        group = self.groups[channel.is_gradient]
        try:
            works = [dist.irecv(b, channel.peer, group, channel.is_gradient) for b in buffers]
        except RuntimeError as error:
            raise PeerLost(f"cannot receive from rank {channel.peer}") from error
        self.arriving.setdefault(channel, deque()).append(_Arriving(buffers, works))

    def receive(self, channel: Channel) -> list[torch.Tensor]:
        """Waits for the oldest message posted on the channel. Raises PeerLost."""
        message = self.arriving[channel].popleft()
        try:
            for work in message.works:
                work.wait()
        except RuntimeError as error:
            raise PeerLost(f"no message from rank {channel.peer}") from error
        return [buffer.to(self.device) for buffer in message.buffers]

    def add_up(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
        """Replaces each tensor by its sum over the group, all of one type in one message."""
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in same]).to(self.staged)
            try:
                dist.all_reduce(flat, group=group)
            except RuntimeError as error:
                raise PeerLost("a replica of this stage does not answer") from error
            parts = torch.split(flat.to(self.device), [tensor.numel() for tensor in same])
            for tensor, part in zip(same, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def barrier(self) -> None:
        """Waits until every rank is here. Raises PeerLost."""
        try:
            dist.barrier()
        except RuntimeError as error:
            raise PeerLost("the ranks did not all come to the end of the epoch") from error

    def drain(self) -> None:
        """Waits until every send has arrived. Raises PeerLost."""
        self.outgoing.put(None)
        self.reaper.join()
        if self.failure is not None:
            raise PeerLost("a message did not arrive") from self.failure
        self.reaper = threading.Thread(target=self._reap, name="sends", daemon=True)
        self.reaper.start()

    def _reap(self) -> None:
        """Waits for the sends in their order, so that their tensors are freed once they are out."""
        while (message := self.outgoing.get()) is not None:
            works, _ = message
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                self.failure = error
                return

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

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist

from pipedream.comm.device.copies import copy_all
from pipedream.comm.messages import (
    Message,
    Messages,
    QueuedMessages,
    TaggedMessages,
    TeamLinks,
    Works,
    lost,
)
from pipedream.schedule.channel import Channel

_NO_ANSWER = "a replica of this stage does not answer"
_NO_LINKS: TeamLinks = MappingProxyType({})
_Kind: TypeAlias = tuple[tuple[tuple[int, ...], torch.dtype], ...]


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
    works: Future[Works]
    empty: bool


def _kind(message: Sequence[TensorSpec]) -> _Kind:
    """Returns shape and type of each tensor: they differ in the last minibatch."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in message)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Returns the type to add up such numbers in."""
    return torch.complex128 if dtype.is_complex else torch.float64


class Transport:
    """The messages of one rank. `links`: the groups that carry them with NCCL; then they are
    queued, and a receive that waits holds up what is behind it.
    """

    def __init__(self, device: torch.device, backend: str, links: TeamLinks = _NO_LINKS) -> None:
        self.device = device
        self.is_queued = backend == "nccl"
        self.staged = device if self.is_queued else torch.device("cpu")
        self.arriving: dict[Channel, deque[_Arriving]] = {}
        self.handed: dict[Channel, deque[Message]] = {}
        self.spare: dict[tuple[Channel, _Kind], list[Message]] = {}
        self.messages: Messages = (
            QueuedMessages(links, device) if self.is_queued else TaggedMessages(device)
        )

    def send(self, parts: Mapping[Channel, Sequence[torch.Tensor]]) -> None:
        """Sends the parts of one message, on channels of one link, and returns at once. Raises
        PeerLost if an earlier message could not be sent.
        """
        sent = {}
        for channel, tensors in parts.items():
            if channel.is_local:
                message = [tensor.detach() for tensor in tensors]
                self.handed.setdefault(channel, deque()).append(message)
            else:
                sent[channel] = [self.to_send(tensor) for tensor in tensors] or [
                    self._buffer(_NOTHING).zero_()
                ]
        if sent:
            self.messages.send(sent)

    def post(self, parts: Mapping[Channel, Sequence[TensorSpec]]) -> None:
        """Posts a receive of the next message on the channels, all of one link, which has these
        values on each. Raises PeerLost if an earlier message could not be sent or received.
        """
        posted = {}
        for channel, values in parts.items():
            if not channel.is_local:
                spare = self.spare.get((channel, _kind(values)))
                posted[channel] = (
                    spare.pop() if spare else [self._buffer(each) for each in values or [_NOTHING]]
                )
        if not posted:
            return
        works = self.messages.receive(posted)
        for channel, buffers in posted.items():
            self.arriving.setdefault(channel, deque()).append(
                _Arriving(buffers, works, empty=not parts[channel])
            )

    def _buffer(self, value: TensorSpec) -> torch.Tensor:
        # Page-locked where it comes from a GPU or goes on to one: such copies are faster.
        through_host = self.staged != self.device
        return torch.empty(
            value.shape, dtype=value.dtype, device=self.staged, pin_memory=through_host
        )

    def to_send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns it, or a copy, where messages are sent from."""
        if self.staged == tensor.device:
            return tensor.detach().contiguous()
        return self._buffer(tensor).copy_(tensor.detach())

    def receive(self, channel: Channel) -> Message:
        """Waits for the oldest message posted on the channel. Raises PeerLost.

        The tensors may be given back with `recycle` when nobody needs them any more.
        """
        if channel.is_local:
            return self.handed[channel].popleft()
        message = self.arriving[channel].popleft()
        with lost(f"no message from rank {channel.source}", channel.source):
            for work in message.works.result()[channel]:
                work.wait()
        if message.empty:
            return []
        return [buffer.to(self.device, non_blocking=True).detach() for buffer in message.buffers]

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
            copy_all((t, part.view_as(t)) for t, part in zip(same, parts, strict=True))

    def average(self, buffers: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
        """Replaces batch-norm statistics and the like by their mean over the replicas."""
        if group is None or not buffers:
            return
        sums = [buffer.to(_exact(buffer.dtype)) for buffer in buffers]
        self.add_up(sums, group)
        means = torch._foreach_div(sums, dist.get_world_size(group))
        copy_all(zip(buffers, means, strict=True))  # counts stay whole numbers

    def begin_sum(self, flat: torch.Tensor, group: dist.ProcessGroup | None) -> Sum:
        """Begins to replace `flat` by its sum over the group. Raises PeerLost."""
        staged = flat if flat.device == self.staged else self.to_send(flat)
        with lost(_NO_ANSWER):
            return Sum(flat, staged, dist.all_reduce(staged, group=group, async_op=True))

    def barrier(self) -> None:
        """Waits until every rank is here. Raises PeerLost."""
        with lost("the ranks did not all reach the end of the epoch"):
            dist.barrier()

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
        with lost(_NO_ANSWER):
            self.work.wait()
        if self.staged is not self.flat:
            self.flat.copy_(self.staged, non_blocking=True)

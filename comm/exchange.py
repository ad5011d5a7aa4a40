"""Ranks that exchange tensors with each other: each sends one to every other, of any sizes.

With NCCL and between hosts they go in one batch of messages; between ranks of one host, with gloo,
through its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from pipedream.comm.messages import PeerLost, begin_messages
from pipedream.comm.shared_memory import SharedMemory, connect_memory
from pipedream.graph.errors import UserError


class ExchangeGroup:
    """This rank's part of a group, in which it is number `here`. Tensors of the host are sent as
    they are with gloo, those of a device with NCCL; others are copied there.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Makes the group; all of its ranks do so at the same time. Raises PeerLost."""
        self.group, self.here = group, dist.get_rank(group)
        self.memory: SharedMemory | None = None
        if dist.get_backend(group) == "gloo":
            with _peers():
                self.memory = connect_memory(group)

    def exchange(
        self, outgoing: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        """Sends one tensor to each rank of the group and receives one of these shapes from each;
        that of this rank stays. What comes may be overwritten by the next exchange. Called by all
        ranks of the group. Raises PeerLost.
        """
        device = outgoing[0].device
        if self.memory is not None:
            parts = _through(self.memory, outgoing, shapes)
        else:
            parts = self._by_messages(outgoing, shapes)
        return [part.to(device) for part in parts]

    def add_up(self, local: Tensor) -> Tensor:
        """Returns the sum over the group: of all tensors if they are few, else of parts that are
        gathered. With gloo it is added up in the same order everywhere; its own all-reduce takes
        longer.
        """
        if dist.get_backend(self.group) == "nccl":
            total = local.clone(memory_format=torch.contiguous_format)
            with _peers():
                dist.all_reduce(total, group=self.group)
            return total
        count = dist.get_world_size(self.group)
        if count == 2:
            return reduce(torch.add, self.exchange([local] * 2, [tuple(local.shape)] * 2))
        pieces = list(torch.tensor_split(local.reshape(-1), count))
        my_shapes = [tuple(pieces[self.here].shape)] * count
        total = reduce(torch.add, self.exchange(pieces, my_shapes))
        shapes = [tuple(piece.shape) for piece in pieces]
        return torch.cat(self.exchange([total] * count, shapes)).view(local.shape)

    def _by_messages(
        self, outgoing: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        # gloo sends tensors of the host alone
        nccl = dist.get_backend(self.group) == "nccl"
        place = outgoing[0].device if nccl else torch.device("cpu")
        ranks = dist.get_process_group_ranks(self.group)
        parts, sent, received = list(outgoing), [], []
        for number, (piece, shape) in enumerate(zip(outgoing, shapes, strict=True)):
            if number == self.here:
                continue
            if piece.numel():
                sent.append((ranks[number], piece.to(place).contiguous()))
            parts[number] = torch.empty(shape, dtype=piece.dtype, device=place)
            if parts[number].numel():
                received.append((ranks[number], parts[number]))
        with _peers():
            for work in begin_messages(self.group, sent, received):
                work.wait()
        return parts


def _through(
    memory: SharedMemory, outgoing: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """Raises PeerLost, and UserError where the system gives no more memory or descriptors."""
    try:
        return memory.exchange(outgoing, shapes)
    except ConnectionError as error:
        raise PeerLost("another rank of the mesh does not answer") from error
    except OSError as error:
        raise UserError(
            f"ranks of this host cannot exchange tensors through its memory: {error.strerror}: "
            "allow more open files (ulimit -n), or more memory"
        ) from error


@contextmanager
def _peers() -> Iterator[None]:
    """Raises PeerLost where the backend, or the system, reports an error."""
    try:
        yield
    except PeerLost:
        raise
    except (RuntimeError, OSError) as error:
        raise PeerLost("another rank of the mesh does not answer") from error

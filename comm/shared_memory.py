"""Tensors exchanged among ranks of one host through its memory.

Between two processes gloo sends over TCP, which copies each tensor four times and wakes a thread at
either end. Here the sender copies it once, to where the receiver reads it, and a stream of bytes
between the two says when. Each way has two places in turn: what is in one is read before the rank
that reads it writes its next message, and the sender waits for that one before it writes there.

The memory has no name and the streams none in the file system, so nothing is left when a rank dies;
the others then read the end of its stream.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

_HEADER = struct.Struct("<Q?")
"""How many bytes the place of the message has, and whether it is a new one, which comes with it."""
_NUMBER = struct.Struct("<I")
_NAME_BYTES = 16
_SECONDS = 60.0
"""The longest that ranks which have met take to connect."""


@dataclass
class _Place:
    """Says where one message is at a time: `size` bytes of memory that two ranks have."""

    size: int = 0
    memory: mmap.mmap | None = None

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert self.memory is not None
        count = torch.Size(shape).numel()
        return torch.frombuffer(self.memory, dtype=dtype, count=count).view(shape)

    def map(self, file: int, size: int) -> None:
        self.size, self.memory = size, mmap.mmap(file, size)
        os.close(file)


@dataclass
class _Peer:
    """Another rank of the group: the stream to it, and the two places of each way."""

    stream: socket.socket
    outgoing: tuple[_Place, _Place] = field(default_factory=lambda: (_Place(), _Place()))
    incoming: tuple[_Place, _Place] = field(default_factory=lambda: (_Place(), _Place()))
    turn: int = 0

    def write(self, tensor: Tensor) -> None:
        place, files = self.outgoing[self.turn], []
        if tensor.nbytes > place.size:
            size = max(mmap.PAGESIZE, 1 << (tensor.nbytes - 1).bit_length())
            file = os.memfd_create("exchange")
            os.ftruncate(file, size)
            files.append(os.dup(file))
            place.map(file, size)
        if tensor.numel():
            place.view(tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())
        header = _HEADER.pack(place.size, bool(files))
        socket.send_fds(self.stream, [header], files)
        for file in files:
            os.close(file)

    def read(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns what the peer has written; it stays until this rank begins the next exchange."""
        place = self.incoming[self.turn]
        header, files, _, _ = socket.recv_fds(self.stream, _HEADER.size, 1, socket.MSG_WAITALL)
        if len(header) < _HEADER.size:
            raise ConnectionError("the stream has ended")
        size, larger = _HEADER.unpack(header)
        if larger:
            if not files:
                raise OSError(errno.EMFILE, "no room for the descriptor of a place in memory")
            place.map(files[0], size)
        self.turn = 1 - self.turn
        is_empty = not torch.Size(shape).numel()
        return torch.empty(shape, dtype=dtype) if is_empty else place.view(shape, dtype)


class SharedMemory:
    """The exchanges of this rank with the others of a group, all of them on this host."""

    def __init__(self, peers: Sequence[_Peer | None]) -> None:
        """Takes the peers by rank in the group; None stands for this one."""
        self.peers = peers

    def exchange(
        self, outgoing: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        """Gives one tensor to each rank of the group, and returns one of these shapes from each,
        which is there until the next exchange, to which it must not be given; that of this rank is
        its own. Called by all of them at the same time. Raises OSError if a rank is gone.
        """
        pairs = list(zip(self.peers, outgoing, strict=True))
        for peer, tensor in pairs:
            if peer is not None:
                peer.write(tensor)
        return [
            tensor if peer is None else peer.read(shape, tensor.dtype)
            for (peer, tensor), shape in zip(pairs, shapes, strict=True)
        ]


def connect_memory(group: dist.ProcessGroup) -> SharedMemory | None:
    """Connects the ranks of a group of gloo; None if they are on several hosts, or in parts of one
    that are kept apart. Called by all of them. Raises RuntimeError or OSError if one is gone.
    """
    hosts = _gathered(_host(), group)
    if any(not torch.equal(host, hosts[0]) for host in hosts):
        return None
    here, count = dist.get_rank(group), dist.get_world_size(group)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.settimeout(_SECONDS)
        name = os.urandom(_NAME_BYTES)
        door.bind(b"\0" + name)  # in no file system
        door.listen(count)
        names = _gathered(torch.frombuffer(bytearray(name), dtype=torch.uint8), group)
        peers: list[_Peer | None] = [None] * count
        for other in range(here + 1, count):
            stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stream.connect(b"\0" + bytes(names[other].tolist()))
            stream.sendall(_NUMBER.pack(here))
            peers[other] = _Peer(stream)
        for _ in range(here):
            stream, _ = door.accept()
            number = stream.recv(_NUMBER.size, socket.MSG_WAITALL)
            if len(number) < _NUMBER.size:
                raise ConnectionError("the stream has ended")
            peers[_NUMBER.unpack(number)[0]] = _Peer(stream)
    return SharedMemory(peers)


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tensors, tensor, group=group)
    return tensors


def _host() -> Tensor:
    """Returns what ranks that may share memory have in common: a running system and its network."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
        shared = f"{boot_id}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        shared = str(os.urandom(_NAME_BYTES))
    digest = hashlib.sha256(shared.encode()).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)

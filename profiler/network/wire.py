"""Messages, all-reduces and all-gathers between the measured ranks, as in pd-train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from pipedream.comm.communicators import Communicators, for_messages
from pipedream.comm.messages import PeerLost
from pipedream.comm.redistribute import MeshGroups
from pipedream.comm.transport import Transport
from pipedream.graph.cluster import Link
from pipedream.graph.placements.placement import Replicate, Shard
from pipedream.profiler.network.levels import Ranks
from pipedream.schedule.channel import Channel, Use, among
from pipedream.schedule.overlap import BUCKET_BYTES
from pipedream.sharding.steps import MeshTensor, make_step

Gather = Callable[[], Tensor]
Wait = Callable[[], None]
"""Returns when what was begun is done. Raises PeerLost."""


class Wire:
    """The connections of one rank. All ranks create it at once, with the same pairs and groups."""

    def __init__(
        self,
        device: torch.device,
        backend: str,
        pairs: Sequence[Ranks],
        groups: Sequence[Ranks],
        timeout: float,
    ) -> None:
        self.device = device
        both = [_channel(*ranks) for pair in pairs for ranks in (pair, pair[::-1])]
        messages = for_messages([channel.team_link for channel in both], backend)
        shared = [among(ranks, use) for ranks in groups for use in (Use.SUMS, Use.EXCHANGE)]
        self.communicators = Communicators.connect([*messages, *shared], device, backend, timeout)
        self.transport = Transport(device, backend, self.communicators.links)

    def tensor(self, size: int) -> Tensor:
        """Returns a float32 tensor of `size` bytes on the device. Not zeros: on a CPU they may be
        one page of memory, which stays in its cache.
        """
        return torch.ones(size // 4, device=self.device)

    def send(self, tensor: Tensor, peer: int) -> None:
        """Starts a send; the tensor must not change until the peer has it."""
        self.transport.send({_channel(dist.get_rank(), peer): [tensor]})

    def post(self, size: int, peer: int) -> Wait:
        """Starts to receive `size` bytes; once waited for, the message is on the device."""
        channel = _channel(peer, dist.get_rank())
        self.transport.post({channel: [torch.empty(size // 4, device="meta")]})
        return lambda: self.transport.recycle(channel, self.transport.receive(channel))

    def add_up(self, gradients: Tensor, flat: Tensor, group: Ranks) -> Wait:
        """Starts to sum a tensor over the ranks of a group as comm/buckets.py does: bucket by
        bucket it is copied to `flat`, as large, which then becomes the sum.
        """
        sums = []
        parts = (torch.split(tensor, BUCKET_BYTES // 4) for tensor in (gradients, flat))
        for gradient, bucket in zip(*parts, strict=True):
            bucket.copy_(gradient)
            sums.append(self.transport.begin_sum(bucket, self.communicators.sums(group)))

        def wait() -> None:
            for each in sums:
                each.wait()

        return wait

    def gatherer(self, size: int, group: Ranks) -> Gather:
        """Returns what gathers `size` bytes in all, as the devices of a mesh gather a value; at
        least an element from each rank of the group. Called by each of them.
        """
        count = len(group)
        each = max(1, size // 4 // count)
        mesh = MeshGroups(
            (count,), group, group.index(dist.get_rank()), self.communicators.exchange
        )
        tensor = MeshTensor((each * count,), 4, mesh.mesh, (Link(bandwidth=1.0),))
        step = make_step(tensor, (Shard(0),), 0, Replicate())
        assert step is not None
        return partial(mesh.redistribute, self.tensor(4 * each), tensor.shape, [step])

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def broadcast(self, numbers: Sequence[float], source: int) -> list[float]:
        """Returns the numbers of rank `source`, on every rank; all give as many and wait for it."""
        values = torch.tensor(numbers, dtype=torch.float64, device=self.transport.staged)
        with peer_errors():
            dist.broadcast(values, source)
        return [float(number) for number in values.tolist()]


def _channel(source: int, target: int) -> Channel:
    return Channel(source, target, (0, 1))


@contextmanager
def peer_errors() -> Iterator[None]:
    """Turns errors of torch.distributed into PeerLost: here they mean that another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost((str(error).strip() or "no message").splitlines()[0]) from error

"""The parameters of a stage, whole on all replicas again after each has updated its part."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pipedream.comm.buckets import divide_into_buckets
from pipedream.comm.device.copies import copy_all
from pipedream.comm.transport import Transport
from pipedream.comm.zero.exchange import Exchange, begin_gather
from pipedream.comm.zero.rows import Rows
from pipedream.schedule.overlap import BUCKET_BYTES

_UNDER_WAY = 2
"""So many buckets at a time: one is filled or emptied while the other is sent."""


class Gather:
    """Of the `parameters` of a stage; the replicas are the ranks of `group` in their order."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        transport: Transport,
        group: dist.ProcessGroup,
        most_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.parameters, self.transport, self.group = parameters, transport, group
        self.buckets = divide_into_buckets(parameters, most_bytes)
        self.replica, self.replicas = dist.get_rank(group), dist.get_world_size(group)

    @torch.no_grad()
    def run(self, parts: Mapping[str, Tensor]) -> None:
        """Fills the parameters with the parts of all replicas; this one's are `parts`, in the shape
        of `own_part`. Called by all of them. Raises PeerLost.
        """
        under_way: deque[tuple[Sequence[str], Rows, Exchange]] = deque()
        for names in self.buckets:
            rows = Rows.of(self.parameters, names, self.replicas)
            own = {name: rows.own(name, self.parameters[name], self.replica) for name in names}
            copy_all((there, parts[name]) for name, there in own.items() if there is not None)
            exchange = begin_gather(self.transport, rows.matrix, self.group)
            under_way.append((names, rows, exchange))
            if len(under_way) == _UNDER_WAY:
                self._end(*under_way.popleft())
        while under_way:
            self._end(*under_way.popleft())

    def _end(self, names: Sequence[str], rows: Rows, exchange: Exchange) -> None:
        exchange.wait()
        flat = {name: self.parameters[name].data.reshape(-1) for name in names}
        copy_all(
            (here, there) for name, each in flat.items() for there, here in rows.pairs(name, each)
        )
        for name, each in flat.items():
            if not self.parameters[name].is_contiguous():  # `each` is a copy
                parameter = self.parameters[name].data
                parameter.copy_(each.view(parameter.shape))

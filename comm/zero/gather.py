"""The parameters of a stage, whole on all replicas again after each has updated its part.

Large ones are gathered where they are, if parts are even; the others by way of buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
"""So many exchanges at a time: a bucket is filled or emptied while another is sent."""

_LARGE = 2**18
"""Bytes above which a message of its own takes less than to copy a parameter twice."""


@dataclass(frozen=True)
class _UnderWay:
    """`rows`: the bucket with the parameters `names`, None if they are gathered where they are."""

    exchange: Exchange
    names: Sequence[str] = ()
    rows: Rows | None = None


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
        self.replica, self.replicas = dist.get_rank(group), dist.get_world_size(group)
        self.in_place = [name for name, each in parameters.items() if self._stays(each)]
        others = {n: each for n, each in parameters.items() if n not in set(self.in_place)}
        self.buckets = divide_into_buckets(others, most_bytes)

    def _stays(self, parameter: Tensor) -> bool:
        even = parameter.numel() % self.replicas == 0
        return even and parameter.nbytes >= _LARGE and parameter.is_contiguous()

    @torch.no_grad()
    def run(self, parts: Mapping[str, Tensor]) -> None:
        """Fills the parameters with the parts of all replicas; this one's are `parts`, in the shape
        of `own_part`, and in the memory of parameters that are contiguous. Called by all of them.
        Raises PeerLost.
        """
        under_way: deque[_UnderWay] = deque()
        for names in (*self.in_place, *self.buckets):
            begun = self._in_place(names) if isinstance(names, str) else self._bucket(names, parts)
            under_way.append(begun)
            if len(under_way) == _UNDER_WAY:
                self._end(under_way.popleft())
        while under_way:
            self._end(under_way.popleft())

    def _in_place(self, name: str) -> _UnderWay:
        matrix = self.parameters[name].data.view(self.replicas, -1)
        return _UnderWay(begin_gather(self.transport, matrix, self.group))

    def _bucket(self, names: Sequence[str], parts: Mapping[str, Tensor]) -> _UnderWay:
        rows = Rows.of(self.parameters, names, self.replicas)
        own = {name: rows.own(name, self.parameters[name], self.replica) for name in names}
        copy_all((there, parts[name]) for name, there in own.items() if there is not None)
        return _UnderWay(begin_gather(self.transport, rows.matrix, self.group), names, rows)

    def _end(self, begun: _UnderWay) -> None:
        begun.exchange.wait()
        if begun.rows is None:
            return
        flat = {name: self.parameters[name].data.reshape(-1) for name in begun.names}
        pairs = (pair for name, each in flat.items() for pair in begun.rows.pairs(name, each))
        copy_all((here, there) for there, here in pairs)
        for name, each in flat.items():
            if not self.parameters[name].is_contiguous():  # `each` is a copy
                parameter = self.parameters[name].data
                parameter.copy_(each.view(parameter.shape))

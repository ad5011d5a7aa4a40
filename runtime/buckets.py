"""The gradients of a replicated stage, added up over its replicas while the backward pass goes on.

As in torch's DistributedDataParallel (Li et al., VLDB 2020, section 3.2.3): parameters stand in
buckets in the reverse of their order, which is about the order in which their gradients come, and a
full bucket is on its way while the others still fill. All replicas send the buckets in the same
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pipedream.runtime.transport import Sum, Transport

BUCKET_BYTES = 4 * 2**20


@dataclass
class _Bucket:
    """`flat` has room for the gradients of `names`; those of `missing` have yet to come."""

    names: list[str]
    flat: Tensor
    missing: set[str]
    sum: Sum | None = None

    def views(self, like: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        parts = torch.split(self.flat, [like[name].numel() for name in self.names])
        for name, part in zip(self.names, parts, strict=True):
            yield name, part.view_as(like[name])


class Buckets:
    """The sums of one stage's gradients over `group`, one round after the other."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        transport: Transport,
        group: dist.ProcessGroup,
        most_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.parameters, self.transport, self.group = parameters, transport, group
        self.buckets = [
            _Bucket(names, _flat(parameters, names), set(names))
            for names in _divide(parameters, most_bytes)
        ]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.names}
        self.begun = 0

    @contextmanager
    def filling(self, leaves: Mapping[str, Tensor]) -> Iterator[None]:
        """A backward pass in here is this replica's last of the round; `leaves` get its gradients.

        It raises PeerLost where a sum cannot be begun.
        """

        def taker(name: str) -> Callable[[Tensor], None]:
            def take(_: Tensor) -> None:
                self.bucket_of[name].missing.discard(name)
                self._begin(lambda each: leaves[each].grad)

            return take

        hooks = [
            leaves[name].register_post_accumulate_grad_hook(taker(name))  # type: ignore[no-untyped-call]
            for name in self.bucket_of
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self, gradients: dict[str, Tensor]) -> None:
        """Puts the sums, until the next round, in the place of this replica's `gradients`.

        Where one is missing the replica has added nothing. Raises PeerLost.
        """
        for bucket in self.buckets:
            bucket.missing.clear()
        self._begin(gradients.get)
        for bucket in self.buckets:
            assert bucket.sum is not None
            bucket.sum.wait()
            gradients.update(bucket.views(self.parameters))
            bucket.missing, bucket.sum = set(bucket.names), None
        self.begun = 0

    def _begin(self, gradient: Callable[[str], Tensor | None]) -> None:
        """Sends the next buckets off, as long as they are full: the same order on all replicas."""
        for bucket in self.buckets[self.begun :]:
            if bucket.missing:
                return
            for name, part in bucket.views(self.parameters):
                found = gradient(name)
                part.copy_(found) if found is not None else part.zero_()
            bucket.sum = self.transport.begin_sum(bucket.flat, self.group)
            self.begun += 1


def _divide(parameters: Mapping[str, Tensor], most_bytes: int) -> list[list[str]]:
    """The names in reverse, cut where a bucket would grow too large or the type changes."""
    groups: list[list[str]] = []
    left, dtype = 0, None
    for name, parameter in reversed(list(parameters.items())):
        left -= parameter.nbytes
        if left < 0 or parameter.dtype != dtype:
            groups.append([])
            left, dtype = most_bytes - parameter.nbytes, parameter.dtype
        groups[-1].append(name)
    return groups


def _flat(parameters: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    first = parameters[names[0]]
    size = sum(parameters[name].numel() for name in names)
    return torch.zeros(size, dtype=first.dtype, device=first.device)

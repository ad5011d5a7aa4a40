"""A bucket of gradients of which each replica gets its part of the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from pipedream.comm.device.copies import copy_all
from pipedream.comm.transport import Transport
from pipedream.comm.zero.exchange import Exchange, begin_scattered_sum
from pipedream.comm.zero.rows import Rows


class DividedBucket:
    """`rows` has room for the gradients of `names`, and in each row for how many replicas have one
    of each.

    `missing`, `without`, `sum`: as of `comm.buckets.Bucket`.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], names: Sequence[str], group: dist.ProcessGroup
    ) -> None:
        self.names, self.missing = list(names), set(names)
        self.without: set[str] = set()
        self.sum: Exchange | None = None
        self.replica = dist.get_rank(group)
        self.rows = Rows.of(parameters, names, dist.get_world_size(group), len(names))

    @property
    def counts(self) -> Tensor:
        """[replicas, names]"""
        return self.rows.matrix[:, -len(self.names) :]

    def learned(self) -> set[str]:
        """Returns, after the sum, the parameters that any replica has a gradient of."""
        if not self.without:  # a look at the counts would wait for a GPU
            return set(self.names)
        counted = zip(self.names, self.counts[self.replica].abs().tolist(), strict=True)
        return {name for name, count in counted if count}

    def fill(self, gradient: Callable[[str], Tensor | None], like: Mapping[str, Tensor]) -> None:
        """Copies the gradients of this replica."""
        self.counts.fill_(1)
        copied: list[tuple[Tensor, Tensor]] = []
        for index, name in enumerate(self.names):
            my_gradient = gradient(name)
            if my_gradient is not None:
                copied += self.rows.pairs(name, my_gradient.reshape(-1))
            else:
                self.rows.matrix[:, self.rows.columns[name]] = 0
                self.counts[:, index] = 0
                self.without.add(name)
        copy_all(copied)

    def begin(self, transport: Transport, group: dist.ProcessGroup) -> None:
        """Begins the sum. Raises PeerLost."""
        self.sum = begin_scattered_sum(transport, self.rows.matrix, group)

    def views(self, like: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor | None]]:
        """Yields this replica's part of each, None if it has none."""
        for name in self.names:
            yield name, self.rows.own(name, like[name], self.replica)

"""The gradients of a stage, added up during the backward pass.

As in torch's DistributedDataParallel (Li et al., VLDB 2020, section 3.2.3): parameters are in
buckets in reverse order, which is about the order in which their gradients come, and a full bucket
is sent while the others still fill. All replicas send the buckets in the same order, and those of
several stages in the order of their stages: who waits for one sum may have begun no other that its
peers begin later.

Where replicas divide the optimizer's state (`comm.zero`), each gets its part of the sums alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from pipedream.comm.device.copies import copy_all
from pipedream.comm.transport import Sum, Transport
from pipedream.comm.zero.bucket import DividedBucket
from pipedream.schedule.operations import Turns
from pipedream.schedule.overlap import BUCKET_BYTES


@dataclass
class Bucket:
    """`flat` has room for the gradients of `names`, and for each how many replicas have one.

    `missing`: parameters whose gradients have not arrived yet. `without`: parameters for which this
    replica has no gradient.
    """

    names: list[str]
    flat: Tensor
    missing: set[str]
    without: set[str] = field(default_factory=set)
    sum: Sum | None = None

    @property
    def counts(self) -> Tensor:
        return self.flat[-len(self.names) :]

    def learned(self) -> set[str]:
        """Returns, after the sum, the parameters that any replica has a gradient of."""
        if not self.without:  # a look at the counts would wait for a GPU
            return set(self.names)
        counted = zip(self.names, self.counts.abs().tolist(), strict=True)
        return {name for name, count in counted if count}

    def fill(self, gradient: Callable[[str], Tensor | None], like: Mapping[str, Tensor]) -> None:
        """Copies the gradients of this replica, in the shapes of `like`."""
        self.counts.fill_(1)
        copied = []
        for index, (name, part) in enumerate(self.views(like)):
            my_gradient = gradient(name)
            if my_gradient is not None:
                copied.append((part, my_gradient))
            else:
                part.zero_()
                self.counts[index] = 0
                self.without.add(name)
        copy_all(copied)

    def begin(self, transport: Transport, group: dist.ProcessGroup) -> None:
        """Begins the sum. Raises PeerLost."""
        self.sum = transport.begin_sum(self.flat, group)

    def views(self, like: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        sizes = [like[name].numel() for name in self.names]
        parts = torch.split(self.flat, [*sizes, len(self.names)])
        for name, part in zip(self.names, parts[:-1], strict=True):
            yield name, part.view_as(like[name])


class Buckets:
    """The sums of one stage's gradients over `group`, one round after the other."""

    turns: Turns[Buckets]

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        transport: Transport,
        group: dist.ProcessGroup,
        most_bytes: int = BUCKET_BYTES,
        divided: bool = False,
    ) -> None:
        """`divided`: each rank of the group gets its part of the sums alone, as `own_part` does."""
        self.parameters, self.transport, self.group = parameters, transport, group
        self.buckets: list[Bucket | DividedBucket] = [
            DividedBucket(parameters, names, group)
            if divided
            else Bucket(names, _flat(parameters, names), set(names))
            for names in divide_into_buckets(parameters, most_bytes)
        ]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.names}
        self.full = self.begun = 0
        take_turns([self])

    @contextmanager
    def filling(self, leaves: Mapping[str, Tensor]) -> Iterator[None]:
        """Gives the context of this replica's last backward pass of the round; `leaves` get its
        gradients.

        Raises PeerLost if a sum cannot be started.
        """

        def taker(name: str) -> Callable[[Tensor], None]:
            return lambda _: self.arrived(name, lambda each: leaves[each].grad)

        hooks = [
            leaves[name].register_post_accumulate_grad_hook(taker(name))  # type: ignore[no-untyped-call]
            for name in self.bucket_of
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def arrived(self, name: str, gradient: Callable[[str], Tensor | None]) -> None:
        """Notes, in this replica's last backward pass of the round, that `gradient(name)` is
        complete.

        Parameters of no bucket are ignored. Raises PeerLost if a sum cannot be started.
        """
        if name in self.bucket_of:
            self.bucket_of[name].missing.discard(name)
            self._fill(gradient)
            self.turns.advance(Buckets.begin)

    def finish(self, gradients: dict[str, Tensor]) -> None:
        """Replaces this replica's `gradients` by the sums, which are valid until the next round.

        Where one is missing, the replica has added nothing; where all replicas have none, or this
        one has no part, there is none afterwards, as in the plain model. Raises PeerLost.
        """
        for bucket in self.buckets:
            bucket.missing.clear()
        self._fill(gradients.get)
        self.turns.advance(Buckets.begin)
        for bucket in self.buckets:
            assert bucket.sum is not None
            bucket.sum.wait()
            learned = bucket.learned()
            for name, part in bucket.views(self.parameters):
                gradients.pop(name, None)
                if name in learned and part is not None:
                    gradients[name] = part
            bucket.missing, bucket.without, bucket.sum = set(bucket.names), set(), None
        self.full = self.begun = 0
        self.turns.end_one()

    def begin(self) -> bool:
        """Begins the sums of full buckets, in their order; returns whether all have begun. Raises
        PeerLost.
        """
        for bucket in self.buckets[self.begun : self.full]:
            bucket.begin(self.transport, self.group)
            self.begun += 1
        return self.begun == len(self.buckets)

    def _fill(self, gradient: Callable[[str], Tensor | None]) -> None:
        """Copies gradients to the next buckets, while all of theirs are there."""
        for bucket in self.buckets[self.full :]:
            if bucket.missing:
                return
            bucket.fill(gradient, self.parameters)
            self.full += 1


def take_turns(every: Sequence[Buckets]) -> None:
    """Has all sums of a rank begin in this order in each round, each as soon as it is full: the
    order that is the same on all its peers.
    """
    turns = Turns(every)
    for buckets in every:
        buckets.turns = turns


def divide_into_buckets(parameters: Mapping[str, Tensor], most_bytes: int) -> list[list[str]]:
    """Returns the names in reverse, cut where a bucket would grow too large or the type changes."""
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
    size = sum(parameters[name].numel() for name in names) + len(names)
    return torch.zeros(size, dtype=first.dtype, device=first.device)

"""The groups of processes that a worker belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass(frozen=True)
class Groups:
    """Who adds gradients up with whom: the replicas of the stage, and the holders of tied weights.

    `stage` is None where the stage has one replica.
    """

    stage: dist.ProcessGroup | None
    tied: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)


def make_groups(
    stage: int, ranks: Sequence[Sequence[int]], tied: Mapping[str, Sequence[int]]
) -> Groups:
    """The groups of a worker of `stage`. Every rank makes every group, in the same order."""
    own = None
    for index, members in enumerate(ranks):
        group = dist.new_group(list(members)) if len(members) > 1 else None
        own = group if index == stage else own
    shared = {}
    for name, stages in tied.items():
        holders = dist.new_group(sorted(rank for index in stages for rank in ranks[index]))
        if stage in stages:
            shared[name] = holders
    return Groups(own, shared)

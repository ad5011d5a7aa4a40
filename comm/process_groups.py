"""The groups of processes that add up gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from pipedream.graph.plan import RankAssignment


@dataclass(frozen=True)
class StageGroups:
    """The processes that add up gradients: the replicas of a stage, and the holders of each of its
    tied weights.

    `replicas` is None where the stage has one replica.
    """

    replicas: dist.ProcessGroup | None
    tied: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)


def make_groups(
    assignment: RankAssignment, tied: Mapping[str, Sequence[int]]
) -> tuple[StageGroups, ...]:
    """The groups of each stage. Every rank has to make them, all in the same order."""
    ranks = [[group.leader for group in groups] for groups in assignment]
    replicas = [dist.new_group(members) if len(members) > 1 else None for members in ranks]
    holders = {
        name: dist.new_group(sorted(rank for stage in stages for rank in ranks[stage]))
        for name, stages in tied.items()
    }
    return tuple(
        StageGroups(own, {name: holders[name] for name in tied if stage in tied[name]})
        for stage, own in enumerate(replicas)
    )

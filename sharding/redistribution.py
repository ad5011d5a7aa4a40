"""The cheapest steps from one placement of a tensor to another on the same mesh.

A shortest path: the nodes are the placements that the tensor can have, the edges are steps
(`steps`), their lengths seconds. The next step is often not the one that looks nearest: a tensor
sharded on two axes along one dimension may be sliced along another first, so that less is gathered.
Memory is not counted: a step may leave a device with more elements than either end.
"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache
from itertools import count
from typing import TypeAlias

from pipedream.graph.placements.placement import Partial, Placement, Placements, Replicate, Shard
from pipedream.graph.placements.regions import check_placements
from pipedream.sharding.steps import Collective, MeshTensor, Step, steps_from

_Length: TypeAlias = tuple[float, int, int, int]


@lru_cache(maxsize=10_000)
def redistribute(tensor: MeshTensor, source: Placements, target: Placements) -> tuple[Step, ...]:
    """Returns the steps that take the least seconds; of those the fewest bytes, then the fewest
    steps.

    The same arguments give the same steps in every process. Raises ValueError, with a message for
    the user, if the tensor cannot be placed in one of these ways.
    """
    check_placements(tensor.shape, tensor.mesh, source)
    check_placements(tensor.shape, tensor.mesh, target)
    choices = _choices(len(tensor.shape), source, target)
    order = count()  # paths of the same length: the one that was found first
    waiting: list[tuple[_Length, int, Placements, tuple[Step, ...]]]
    waiting = [(_length(()), next(order), source, ())]
    done: set[Placements] = set()
    while waiting:
        _, _, placements, path = heapq.heappop(waiting)
        if placements == target:
            return path
        if placements in done:
            continue
        done.add(placements)
        for step in steps_from(tensor, placements, choices):
            if step.target not in done:
                further = (*path, step)
                heapq.heappush(waiting, (_length(further), next(order), step.target, further))
    raise AssertionError(f"no steps lead from {source} to {target}")


def _length(path: tuple[Step, ...]) -> _Length:
    """Returns the length of a path: seconds, bytes, steps, and steps that make zeros: the later
    decide where the earlier are equal. Seconds are added up exactly: those of an all-reduce are
    those of its two halves.
    """
    zeros = [step.collective in (Collective.KEEP_ONE, Collective.ZERO_PAD) for step in path]
    return (
        math.fsum(step.seconds for step in path),
        sum(step.bytes for step in path),
        len(path),
        sum(zeros),
    )


def _choices(dims: int, source: Placements, target: Placements) -> tuple[Placement, ...]:
    """Lists what an axis may be on the way: replicated, partial, or sharded along any dimension, in
    as many chunks as at either end or in one.

    Partial helps even between ends that are not: (Replicate, Shard(0)) becomes (Shard(0), Shard(0))
    at half the bytes of an all-gather if what axis 1 does not hold is padded with zeros, axis 0
    slices that, and a reduce-scatter adds it up. (Adding zeros changes no number, but makes a
    negative zero a positive one.)
    """
    chunks = {each.chunks for each in (*source, *target) if isinstance(each, Shard)} | {1}
    shards = (Shard(dim, number) for number in sorted(chunks) for dim in range(dims))
    return (Replicate(), Partial(), *shards)

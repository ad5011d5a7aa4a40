"""Steps of a redistribution: each changes the placement on one axis of the mesh, at a cost.

The devices of one group of the axis (`axis_groups`) exchange elements among themselves, so what a
device is to hold must be held in its group. That is so unless a later axis shards the same
dimension: with (Shard(0), Shard(0)) on mesh (2, 2), device 0 has the first quarter of the rows and
device 2, the other one of its group on axis 0, the third; device 0 cannot get the second from it.
Only the last axis that shards a dimension can be gathered, sliced or exchanged along it.

On an axis of k devices a collective sends, from the busiest device of the busiest group:

    all-gather      (k - 1) times the largest part: each device sends its part to all others
    reduce-scatter  as much: each device receives its part from all others
    all-reduce      2 (k - 1) ceil(n / k) of n elements: a reduce-scatter and an all-gather
    all-to-all      what a device held and does not keep, or what it gets if that is more

These are the bytes of rings over parts padded to the largest, and for parts of equal size
(k - 1) / k of all of them. A ring of k devices takes k - 1 rounds, so the latency of the link
counts k - 1 times, and twice that for an all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import product

from pipedream.graph.cluster import Link
from pipedream.graph.placements.placement import (
    Mesh,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
)
from pipedream.graph.placements.regions import (
    check_placements,
    held_region,
    intersection,
    local_sizes,
)


class Collective(Enum):
    """Names what an axis does together in a step; the last three send nothing."""

    ALL_GATHER = "all-gather"
    """Shard to Replicate."""
    ALL_TO_ALL = "all-to-all"
    """Shard to another Shard."""
    REDUCE_SCATTER = "reduce-scatter"
    """Partial to Shard."""
    ALL_REDUCE = "all-reduce"
    """Partial to Replicate."""
    SLICE = "slice"
    """Replicate to Shard."""
    KEEP_ONE = "keep-one"
    """Replicate to Partial: the first device of the axis keeps its elements; others have zeros."""
    ZERO_PAD = "zero-pad"
    """Shard to Partial: zeros stand for the elements of the other devices."""


COLLECTIVES: dict[tuple[type[Placement], type[Placement]], Collective] = {
    (Shard, Replicate): Collective.ALL_GATHER,
    (Shard, Shard): Collective.ALL_TO_ALL,
    (Partial, Shard): Collective.REDUCE_SCATTER,
    (Partial, Replicate): Collective.ALL_REDUCE,
    (Replicate, Shard): Collective.SLICE,
    (Replicate, Partial): Collective.KEEP_ONE,
    (Shard, Partial): Collective.ZERO_PAD,
}


@dataclass(frozen=True)
class MeshTensor:
    """A tensor on a mesh, however it is placed there."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    element_bytes: int
    mesh: Mesh
    links: tuple[Link, ...]
    """Of each axis: between neighbours in a group of the axis."""

    def __post_init__(self) -> None:
        assert len(self.links) == len(self.mesh), self


@dataclass(frozen=True)
class Step:
    """Changes the placement on one axis."""

    collective: Collective
    axis: int
    source: Placements
    target: Placements
    bytes: int
    """Sent or received by the busiest device."""
    seconds: float


def is_free(mesh: Mesh, placements: Placements, axis: int, placement: Placement) -> bool:
    """Tells whether no later axis shards the dimension that `placement` shards."""
    return not isinstance(placement, Shard) or not any(
        isinstance(later, Shard) and later.dim == placement.dim and size > 1
        for later, size in zip(placements[axis + 1 :], mesh[axis + 1 :], strict=True)
    )


def can_be_placed(shape: tuple[int, ...], mesh: Mesh, placements: Placements) -> bool:
    try:
        check_placements(shape, mesh, placements)
    except ValueError:
        return False
    return True


def make_step(
    tensor: MeshTensor, source: Placements, axis: int, placement: Placement
) -> Step | None:
    """Returns the step to `placement` on the axis; None if one step does not lead there."""
    current = source[axis]
    if current == placement:
        return None
    if not all(is_free(tensor.mesh, source, axis, each) for each in (current, placement)):
        return None
    target = (*source[:axis], placement, *source[axis + 1 :])
    if not can_be_placed(tensor.shape, tensor.mesh, target):
        return None
    held = (elements_held(tensor.shape, tensor.mesh, each) for each in (source, target))
    collective, sent = sent_bytes(tensor, source, target, axis, *held)
    seconds = _ring_seconds(tensor.links[axis], sent, ring_rounds(collective, tensor.mesh[axis]))
    return Step(collective, axis, source, target, sent, seconds)


def sent_bytes(
    tensor: MeshTensor,
    source: Placements,
    target: Placements,
    axis: int,
    held_before: int,
    held_after: int,
) -> tuple[Collective, int]:
    """Returns the collective of a step on the axis, and what its busiest device sends or receives.
    `held_before`, `held_after`: elements on the device that holds most at either end.
    """
    collective = COLLECTIVES[type(source[axis]), type(target[axis])]
    devices = tensor.mesh[axis]
    elements = 0
    if collective is Collective.ALL_GATHER:
        elements = (devices - 1) * held_before
    elif collective is Collective.REDUCE_SCATTER:
        elements = (devices - 1) * held_after
    elif collective is Collective.ALL_REDUCE:
        elements = 2 * (devices - 1) * math.ceil(held_before / devices)
    elif collective is Collective.ALL_TO_ALL:
        even = _is_even(tensor, source, held_before) and _is_even(tensor, target, held_after)
        if even and source[axis].dim != target[axis].dim:  # type: ignore[union-attr]
            elements = held_before - held_before // devices
        else:
            elements = _exchanged(tensor.shape, tensor.mesh, source, target, axis)
    return collective, tensor.element_bytes * elements


def ring_rounds(collective: Collective, devices: int) -> int:
    """Returns the rounds of a ring of so many devices."""
    return (devices - 1) * (2 if collective is Collective.ALL_REDUCE else 1)


def steps_from(
    tensor: MeshTensor, source: Placements, choices: Sequence[Placement]
) -> Iterator[Step]:
    """Yields all steps from `source` to one of the `choices` on an axis: the first axis first."""
    for axis in range(len(source)):
        for placement in choices:
            step = make_step(tensor, source, axis, placement)
            if step is not None:
                yield step


@lru_cache(maxsize=100_000)
def _ring_seconds(link: Link, sent: int, rounds: int) -> float:
    return rounds * float(link.seconds(sent / rounds)) if sent else 0.0


def _is_even(tensor: MeshTensor, placements: Placements, held: int) -> bool:
    """Tells whether all devices hold as much."""
    axes = zip(placements, tensor.mesh, strict=True)
    parts = math.prod(size for each, size in axes if isinstance(each, Shard))
    return held * parts == math.prod(tensor.shape)


def elements_held(shape: tuple[int, ...], mesh: Mesh, placements: Placements) -> int:
    """Returns the elements on the device that holds most."""
    return math.prod(
        max(local_sizes(size, mesh, placements, dim)) for dim, size in enumerate(shape)
    )


def _exchanged(
    shape: tuple[int, ...], mesh: Mesh, source: Placements, target: Placements, axis: int
) -> int:
    """Elements of an all-to-all. Its groups differ in how many elements the other axes leave them
    of the dimensions exchanged; of all other dimensions the busiest has the most there is.
    """
    before, after = source[axis], target[axis]
    assert isinstance(before, Shard)
    assert isinstance(after, Shard)
    dims = sorted({before.dim, after.dim})
    of_group = (*source[:axis], Replicate(), *source[axis + 1 :])
    sizes = [local_sizes(size, mesh, of_group, dim) for dim, size in enumerate(shape)]
    apart = math.prod(max(sizes[dim]) for dim in range(len(shape)) if dim not in dims)
    old, new = (replace(each, dim=dims.index(each.dim)) for each in (before, after))
    return apart * max(
        _exchanged_in_group(group_shape, mesh[axis], old, new)
        for group_shape in product(*(sizes[dim] for dim in dims))
    )


@lru_cache(maxsize=100_000)
def _exchanged_in_group(shape: tuple[int, ...], devices: int, before: Shard, after: Shard) -> int:
    """Returns the same for one group, which holds a tensor of this shape."""
    busiest = 0
    for device in range(devices):
        old = held_region(shape, (devices,), (before,), device)
        new = held_region(shape, (devices,), (after,), device)
        busiest = max(busiest, max(old.size, new.size) - intersection(old, new).size)
    return busiest

"""The region of a tensor that a device holds: for each dimension, the intervals of its indices.

A device's local tensor is its region packed: dimension by dimension, its intervals one after the
other. Rows 0 to 5 in two chunks over two devices:

    region of device 0: [0, 2) and [3, 5)    its local rows are 0 1 3 4
    region of device 1: [2, 3) and [5, 6)    its local rows are 2 5
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import TypeAlias

from pipedream.graph.placements.placement import Mesh, Placements, Shard, coordinates, sharding_axes

Interval: TypeAlias = tuple[int, int]
"""The indices from the first number up to, and without, the second."""
Intervals: TypeAlias = tuple[Interval, ...]
"""Disjoint, in ascending order, none empty, and none beginning where another ends."""
Slices: TypeAlias = tuple[slice, ...]


@dataclass(frozen=True)
class Region:
    """A set of indices for each dimension, and the elements at all their combinations."""

    dims: tuple[Intervals, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the region, packed."""
        return tuple(length(intervals) for intervals in self.dims)

    @property
    def size(self) -> int:
        """Returns how many elements it has."""
        return math.prod(self.shape)


def whole(shape: tuple[int, ...]) -> Region:
    """Returns all of a tensor."""
    return Region(tuple(_merged([(0, size)]) for size in shape))


def split(size: int, parts: int, index: int) -> Interval:
    """Returns the part of `size` elements that has this index: 9 in 4 parts is 3, 2, 2, 2."""
    each, larger = divmod(size, parts)
    begin = index * each + min(index, larger)
    return begin, begin + each + (index < larger)


@lru_cache(maxsize=100_000)
def held_region(shape: tuple[int, ...], mesh: Mesh, placements: Placements, device: int) -> Region:
    """Returns what the device holds of a tensor of this shape; of a partial one, terms of these
    elements.

    The placements must fit (`check_placements`).
    """
    position = coordinates(mesh, device)
    dims = list(whole(shape).dims)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            indices = dims[placement.dim]
            parts = _chunk_parts(length(indices), mesh[axis], position[axis], placement.chunks)
            dims[placement.dim] = select(indices, parts)
    return Region(tuple(dims))


def check_placements(shape: tuple[int, ...], mesh: Mesh, placements: Placements) -> None:
    """Raises ValueError, with a message for the user, if the tensor cannot be placed so."""
    if len(placements) != len(mesh):
        raise ValueError(
            f"{len(placements)} placements for a mesh of {len(mesh)} axes: give one for each axis"
        )
    for placement in placements:
        if isinstance(placement, Shard) and placement.dim >= len(shape):
            raise ValueError(
                f"dimension {placement.dim} is sharded, but the tensor has {len(shape)}: "
                "dimensions count from 0"
            )
    for dim, size in enumerate(shape):
        sizes = {size}
        for axis, placement in sharding_axes(placements, dim):
            for count in sizes:
                if count % placement.chunks:
                    raise ValueError(
                        f"{count} elements of dimension {dim} are not {placement.chunks} equal "
                        f"chunks on axis {axis}: choose chunks that divide them"
                    )
            sizes = _split_sizes(sizes, mesh[axis], placement.chunks)


def local_sizes(size: int, mesh: Mesh, placements: Placements, dim: int) -> set[int]:
    """Returns how many of the dimension's `size` elements devices hold: each number that occurs."""
    cuts = tuple((mesh[axis], each.chunks) for axis, each in sharding_axes(placements, dim))
    return set(_cut_sizes(size, cuts)) if cuts else {size}


def intersection(first: Region, second: Region) -> Region:
    """Returns the elements that both have."""
    return Region(
        tuple(_common(one, other) for one, other in zip(first.dims, second.dims, strict=True))
    )


def positions(part: Region, region: Region) -> Region:
    """Returns where `part`, which is within `region`, is in the local tensor of that."""
    dims = tuple(map(_dim_positions, part.dims, region.dims))
    local_region = Region(dims)
    assert local_region.size == part.size, f"{part} is not within {region}"
    return local_region


@lru_cache(maxsize=10_000)
def blocks(part: Region, region: Region) -> tuple[tuple[Slices, Slices], ...]:
    """Returns the boxes that make up `part`: where each is in the local tensor of `region`, which
    has all of them, and where in that of `part`. So the one is cut out of the other, or pasted into
    it.
    """
    here = positions(part, region).dims
    there = tuple(map(_packed, here))
    return tuple(zip(_boxes(here), _boxes(there), strict=True))


def length(intervals: Intervals) -> int:
    return sum(end - begin for begin, end in intervals)


def _packed(intervals: Intervals) -> Intervals:
    """Returns as many intervals, as long as these, one right after the other."""
    ends = list(accumulate((end - begin for begin, end in intervals), initial=0))
    return tuple(pairwise(ends))


def _boxes(dims: tuple[Intervals, ...]) -> Iterator[Slices]:
    return product(*([slice(begin, end) for begin, end in intervals] for intervals in dims))


def _split_sizes(sizes: Iterable[int], parts: int, chunks: int) -> set[int]:
    """The first part is the largest and the last the smallest, and no part is between them."""
    return {
        chunks * (end - begin)
        for size in sizes
        for begin, end in (split(size // chunks, parts, index) for index in (0, parts - 1))
    }


@lru_cache(maxsize=100_000)
def _cut_sizes(size: int, cuts: tuple[tuple[int, int], ...]) -> frozenset[int]:
    """`cuts`: of each axis that shards the dimension the parts and the chunks."""
    sizes = {size}
    for parts, chunks in cuts:
        sizes = _split_sizes(sizes, parts, chunks)
    return frozenset(sizes)


def _chunk_parts(size: int, parts: int, index: int, chunks: int) -> Intervals:
    """Returns the part with this index of each of `chunks` equal chunks of `size` elements."""
    assert size % chunks == 0, f"{size} elements are not {chunks} equal chunks"
    chunk = size // chunks
    begin, end = split(chunk, parts, index)
    return _merged((first + begin, first + end) for first in range(0, chunks * chunk, chunk or 1))


def select(region: Intervals, local: Intervals) -> Intervals:
    """Returns the indices at the `local` positions of `region`."""
    return _moved(local, _packed(region), region)


def _dim_positions(part: Intervals, region: Intervals) -> Intervals:
    """Returns the positions of `part` in `region`: the inverse of `select`."""
    return _moved(part, region, _packed(region))


def _moved(part: Intervals, source: Intervals, target: Intervals) -> Intervals:
    """Returns where `part` of the `source` intervals is if each becomes the `target` one."""
    return _merged(
        (to + first - begin, to + last - begin)
        for (begin, end), (to, _) in zip(source, target, strict=True)
        for first, last in _common(((begin, end),), part)
    )


def _common(first: Intervals, second: Intervals) -> Intervals:
    pairs = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return _merged(pairs)


def _merged(intervals: Iterable[Interval]) -> Intervals:
    """Returns ascending intervals without empty ones, and with neighbours joined."""
    merged: list[Interval] = []
    for begin, end in intervals:
        if begin >= end:
            continue
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return tuple(merged)

"""Regions beside index arrays that numpy cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharded import Array, element_ids, local_part, placed

from pipedream.graph.placements.placement import (
    Mesh,
    Placements,
    Replicate,
    Shard,
    axis_groups,
    coordinates,
    device_count,
)
from pipedream.graph.placements.regions import (
    Region,
    blocks,
    check_placements,
    held_region,
    intersection,
    local_sizes,
    positions,
    split,
    whole,
)


def drawn(size: int, mesh: Mesh, placements: Placements) -> str:
    """Who holds each element of one dimension, a line for each device."""
    held = [held_region((size,), mesh, placements, d).dims[0] for d in range(device_count(mesh))]
    return "\n".join(
        "".join("#" if any(a <= i < b for a, b in dim) else "." for i in range(size))
        for dim in held
    )


@pytest.mark.parametrize(
    ("size", "mesh", "placements", "diagram"),
    [
        (9, (4,), (Shard(0),), "###...... ...##.... .....##.. .......##"),
        (2, (4,), (Shard(0),), "#. .# .. .."),
        (8, (2, 2), (Shard(0), Shard(0)), "##...... ..##.... ....##.. ......##"),
        (8, (2, 2), (Shard(0), Replicate()), "####.... ####.... ....#### ....####"),
        (8, (2, 2), (Replicate(), Shard(0)), "####.... ....#### ####.... ....####"),
        (9, (2,), (Shard(0, chunks=3),), "##.##.##. ..#..#..#"),
        (8, (2, 2), (Shard(0, chunks=2), Shard(0)), "##...... ....##.. ..##.... ......##"),
        (8, (2, 2), (Shard(0), Shard(0, chunks=2)), "#.#..... .#.#.... ....#.#. .....#.#"),
    ],
)
def test_who_holds_what(size: int, mesh: Mesh, placements: Placements, diagram: str) -> None:
    assert drawn(size, mesh, placements).split("\n") == diagram.split(" ")


@given(placed())
def test_a_device_holds_what_cutting_the_array_leaves(
    case: tuple[tuple[int, ...], Mesh, tuple[Placements, ...]],
) -> None:
    shape, mesh, (placements,) = case
    ids = element_ids(shape)
    for device in range(device_count(mesh)):
        region = held_region(shape, mesh, placements, device)
        expected = local_part(ids, mesh, placements, device)
        assert region.shape == expected.shape
        assert region.size == expected.size
        assert (_picked(ids, region) == expected).all()


def _indices(intervals: tuple[tuple[int, int], ...]) -> list[int]:
    return [index for begin, end in intervals for index in range(begin, end)]


@given(placed(ways=2))
def test_what_two_devices_share_is_found_in_both(
    case: tuple[tuple[int, ...], Mesh, tuple[Placements, ...]],
) -> None:
    shape, mesh, (first, second) = case
    ids = element_ids(shape)
    local = local_part(ids, mesh, first, 0)
    one = held_region(shape, mesh, first, 0)
    for device in range(device_count(mesh)):
        part = intersection(one, held_region(shape, mesh, second, device))
        shared = sorted({*local.flat} & {*local_part(ids, mesh, second, device).flat})
        assert _picked(ids, part).ravel().tolist() == shared
        assert _picked(local, positions(part, one)).ravel().tolist() == shared
        cut = np.full(part.shape, -1.0)
        for here, there in blocks(part, one):
            cut[there] = local[here]
        assert cut.ravel().tolist() == shared


def _picked(array: Array, region: Region) -> Array:
    picked: Array = array[np.ix_(*(_indices(dim) for dim in region.dims))]
    return picked


@given(placed())
def test_local_sizes_are_those_that_occur(
    case: tuple[tuple[int, ...], Mesh, tuple[Placements, ...]],
) -> None:
    shape, mesh, (placements,) = case
    shapes = [held_region(shape, mesh, placements, d).shape for d in range(device_count(mesh))]
    for dim, size in enumerate(shape):
        assert local_sizes(size, mesh, placements, dim) == {each[dim] for each in shapes}


@given(st.integers(0, 50), st.integers(1, 9))
def test_parts_are_balanced_and_the_larger_ones_first(size: int, parts: int) -> None:
    ends = [split(size, parts, index) for index in range(parts)]
    assert [begin for begin, _ in ends] == [0, *(end for _, end in ends[:-1])]
    assert ends[-1][1] == size
    lengths = [end - begin for begin, end in ends]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_a_scalar_is_one_element() -> None:
    region = held_region((), (2,), (Replicate(),), 1)
    assert region == whole(())
    assert (region.shape, region.size) == ((), 1)
    assert list(blocks(region, region)) == [((), ())]


def test_devices_are_numbered_row_by_row() -> None:
    assert [coordinates((2, 3), device) for device in (0, 2, 3, 5)] == [
        (0, 0),
        (0, 2),
        (1, 0),
        (1, 2),
    ]
    assert axis_groups((2, 3), 0) == ((0, 3), (1, 4), (2, 5))
    assert axis_groups((2, 3), 1) == ((0, 1, 2), (3, 4, 5))


@pytest.mark.parametrize(
    ("shape", "placements", "message"),
    [
        ((4,), (Shard(0),), "1 placements for a mesh of 2 axes: give one for each axis"),
        ((4,), (Shard(1), Replicate()), "dimension 1 is sharded, but the tensor has 1"),
        ((8,), (Shard(0, 3), Replicate()), "8 elements of dimension 0 are not 3 equal chunks on"),
        ((9,), (Shard(0), Shard(0, 5)), "elements of dimension 0 are not 5 equal chunks on axis 1"),
    ],
)
def test_placements_that_do_not_fit(
    shape: tuple[int, ...], placements: Placements, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_placements(shape, (2, 2), placements)

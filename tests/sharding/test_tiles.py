"""Transfers between two stages: every element arrives once, and no more is sent than is needed."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from amount import examples
from hypothesis import given, settings
from sharded import MESHES, held_ids, random_placements, random_shape, received

from pipedream.graph.placements.placement import (
    Mesh,
    Partial,
    Placements,
    Replicate,
    device_count,
    parse_placements,
)
from pipedream.graph.placements.regions import Region
from pipedream.sharding.tiles import TileTransfers, Transfer, match_tiles


def drawn(transfers: tuple[Transfer, ...]) -> list[str]:
    """`0>1 [0:2,0:4]`: source, target, and the intervals of each dimension."""
    return [f"{each.source}>{each.target} [{_text(each.region)}]" for each in transfers]


def _text(region: Region) -> str:
    return ",".join("+".join(f"{a}:{b}" for a, b in dim) for dim in region.dims)


@pytest.mark.parametrize(
    ("source", "target", "sends", "gathers"),
    [
        ("S(0)", "S(0)", ["0>0 [0:2,0:6]", "1>1 [2:4,0:6]"], []),
        (
            "S(0)",
            "S(1)",
            ["0>0 [0:2,0:3]", "1>0 [2:4,0:3]", "0>1 [0:2,3:6]", "1>1 [2:4,3:6]"],
            [],
        ),
        (
            "S(0)",
            "R",
            ["0>0 [0:2,0:3]", "1>0 [2:4,0:3]", "0>1 [0:2,3:6]", "1>1 [2:4,3:6]"],
            ["0>1 [0:4,0:3]", "1>0 [0:4,3:6]"],
        ),
        (
            "R",
            "R",
            ["0>0 [0:4,0:3]", "1>1 [0:4,3:6]"],
            ["0>1 [0:4,0:3]", "1>0 [0:4,3:6]"],
        ),
        ("R", "S(0)", ["0>0 [0:2,0:6]", "1>1 [2:4,0:6]"], []),
        (
            "S(0)",
            "S(0,chunks=2)",
            ["0>0 [0:1,0:6]", "1>0 [2:3,0:6]", "0>1 [1:2,0:6]", "1>1 [3:4,0:6]"],
            [],
        ),
    ],
)
def test_who_sends_what(source: str, target: str, sends: list[str], gathers: list[str]) -> None:
    """Four rows of six."""
    transfers = match_tiles(
        (4, 6), ((2,), parse_placements(source)), ((2,), parse_placements(target))
    )
    assert drawn(transfers.sends) == sends
    assert drawn(transfers.gathers) == gathers


def test_replicas_share_the_sending() -> None:
    """Three devices hold all of it, four get a quarter each: the first sends two of them."""
    transfers = match_tiles((8,), ((3,), (Replicate(),)), ((4,), parse_placements("S(0)")))
    assert transfers.sent(4) == {0: 16, 1: 8, 2: 8}
    assert received(transfers, 4) == {0: 8, 1: 8, 2: 8, 3: 8}


def test_a_scalar_is_sent_once() -> None:
    transfers = match_tiles((), ((2,), (Replicate(),)), ((2,), (Replicate(),)))
    assert drawn(transfers.sends) == ["0>0 []"]
    assert drawn(transfers.gathers) == ["0>1 []"]


def test_partial_tensors_are_summed_first() -> None:
    with pytest.raises(AssertionError, match="partial tensors are summed before they are sent"):
        match_tiles((4,), ((2,), (Partial(),)), ((2,), (Replicate(),)))


@settings(max_examples=examples(300), deadline=None)
@given(rng=...)
def test_every_element_arrives_once(rng: random.Random) -> None:
    shape = random_shape(rng)
    meshes: tuple[Mesh, ...] = (*MESHES, (3,), (2, 3))
    source, target = (
        (mesh, random_placements(rng, shape, mesh, partial=False))
        for mesh in (rng.choice(meshes), rng.choice(meshes))
    )
    check_transfers(shape, source, target, match_tiles(shape, source, target))
    direct = match_tiles(shape, source, target, gather=False)
    assert not direct.gathers
    check_transfers(shape, source, target, direct)


def check_transfers(
    shape: tuple[int, ...],
    source: tuple[Mesh, Placements],
    target: tuple[Mesh, Placements],
    transfers: TileTransfers,
) -> None:
    """Counts elements by their numbers."""
    arrived = [Counter[float]() for _ in range(device_count(target[0]))]
    for each in transfers.sends:
        ids = elements(shape, each.region)
        assert set(ids) <= set(held_ids(shape, *source, each.source))
        arrived[each.target].update(ids)
    shares = [set(ids) for ids in arrived]
    for each in transfers.gathers:
        ids = elements(shape, each.region)
        assert set(ids) <= shares[each.source]
        arrived[each.target].update(ids)
    needed = [held_ids(shape, *target, device) for device in range(len(arrived))]
    for ids, found in zip(needed, arrived, strict=True):
        assert found == Counter(ids)
    distinct = {tuple(ids) for ids in needed}
    sent = distinct if transfers.gathers else needed
    assert sum(transfers.sent(1).values()) == sum(map(len, sent))
    for device, amount in received(transfers, 1).items():
        assert amount + transfers.gathered(1).get(device, 0) == len(needed[device])
    pairs = [(each.source, each.target) for each in transfers.sends]
    assert len(set(pairs)) == len(pairs)


def elements(shape: tuple[int, ...], region: Region) -> list[int]:
    """The numbers of the elements of a region, in order."""
    numbers = [0]
    for size, dim in zip(shape, region.dims, strict=True):
        indices = [index for begin, end in dim for index in range(begin, end)]
        numbers = [number * size + index for number in numbers for index in indices]
    return numbers

"""A tensor sent from the devices of one stage to those of the next, which place it differently.

Each part of the source tensor that is held by one device, or by several alike, is a tile, and so is
each part of the target tensor. What a target tile needs is sent once, however many devices hold
that tile: it is divided among them, and they gather the rest from each other, over the faster links
within their stage (Zheng et al., Alpa, OSDI 2022, section 6, "local all-gather").

A tensor of four rows, sharded over two devices, sent to a stage that replicates it on two:

    source 0: 0 1   --[0 1]--> target 0: 0 1, and from target 1: 2 3
    source 1: 2 3   --[2 3]--> target 1: 2 3, and from target 0: 0 1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipedream.graph.placements.placement import Mesh, Partial, Placements, device_count
from pipedream.graph.placements.regions import (
    Region,
    check_placements,
    held_region,
    intersection,
    select,
    split,
)


@dataclass(frozen=True)
class Transfer:
    """A region that one device sends to another. Each is numbered in its own mesh."""

    source: int
    target: int
    region: Region


@dataclass(frozen=True)
class TileTransfers:
    """Lists what is sent: first `sends`, then `gathers` among the target devices."""

    sends: tuple[Transfer, ...]
    """From source to target devices; at most one for each pair."""
    gathers: tuple[Transfer, ...]
    """From target to target devices; at most one for each pair."""

    def sent(self, element_bytes: int) -> dict[int, int]:
        """Returns the bytes that source devices send, by device, without zeros."""
        return _bytes(element_bytes, ((each.source, each.region) for each in self.sends))

    def gathered(self, element_bytes: int) -> dict[int, int]:
        """Returns the bytes that target devices receive from each other."""
        return _bytes(element_bytes, ((each.target, each.region) for each in self.gathers))


def match_tiles(
    shape: tuple[int, ...],
    source: tuple[Mesh, Placements],
    target: tuple[Mesh, Placements],
    gather: bool = True,
) -> TileTransfers:
    """Lists what is sent so that the target devices hold the tensor; the same in every process.
    Without `gather` each target device is sent all that it holds.

    Of several devices that could send a region, the one that sends least so far does. Neither side
    may be partial: sums are made within the stage first (`redistribution`), since every term sent
    would be as large as the sum. Raises ValueError if the tensor cannot be placed so.
    """
    for mesh, placements in (source, target):
        check_placements(shape, mesh, placements)
        assert Partial() not in placements, "partial tensors are summed before they are sent"
    tiles, origins = _tiles(shape, *target), _tiles(shape, *source)
    if not gather:
        each_whole = [(device, tile) for tile, devices in tiles.items() for device in devices]
        return TileTransfers(_balanced(origins, each_whole), ())
    shares = [share for tile, devices in tiles.items() for share in _shares(tile, devices)]
    gathers = (each for tile, devices in tiles.items() for each in _gathers(tile, devices))
    return TileTransfers(_balanced(origins, shares), tuple(gathers))


def _tiles(shape: tuple[int, ...], mesh: Mesh, placements: Placements) -> dict[Region, list[int]]:
    """Returns the regions that devices hold, and the devices that hold each; without empty ones."""
    tiles = defaultdict(list)
    for device in range(device_count(mesh)):
        region = held_region(shape, mesh, placements, device)
        if region.size:
            tiles[region].append(device)
    return dict(tiles)


def _shares(tile: Region, devices: list[int]) -> list[tuple[int, Region]]:
    """Returns the parts of the tile for each device, of its longest dimension; none empty."""
    if len(devices) == 1 or not tile.dims:
        return [(devices[0], tile)]
    dim = tile.shape.index(max(tile.shape))
    shares = []
    for index, device in enumerate(devices):
        begin, end = split(tile.shape[dim], len(devices), index)
        if begin < end:
            part = select(tile.dims[dim], ((begin, end),))
            shares.append((device, Region((*tile.dims[:dim], part, *tile.dims[dim + 1 :]))))
    return shares


def _balanced(
    tiles: dict[Region, list[int]], shares: list[tuple[int, Region]]
) -> tuple[Transfer, ...]:
    """Returns each share as transfers from the tiles that it lies in."""
    load: dict[int, int] = defaultdict(int)
    sends = []
    for device, share in shares:
        for tile, holders in tiles.items():
            region = intersection(tile, share)
            if region.size:
                sender = min(holders, key=lambda holder: (load[holder], holder))
                load[sender] += region.size
                sends.append(Transfer(sender, device, region))
    return tuple(sends)


def _gathers(tile: Region, devices: list[int]) -> Iterator[Transfer]:
    """Every device sends its share of the tile to all others that hold it."""
    for device, share in _shares(tile, devices):
        yield from (Transfer(device, to, share) for to in devices if to != device)


def _bytes(element_bytes: int, parts: Iterable[tuple[int, Region]]) -> dict[int, int]:
    total: dict[int, int] = defaultdict(int)
    for device, region in parts:
        total[device] += region.size * element_bytes
    return dict(total)

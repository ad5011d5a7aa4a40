"""How the devices of a mesh hold a tensor: one placement for each axis of the mesh.

A mesh is the tuple of its axes' sizes; its devices are numbered row by row, the last axis fastest.
On each axis a tensor is replicated, sharded along a dimension, or partial: the devices hold terms
of a sum. As in torch's DTensor, several axes may shard one dimension; the first of them splits it
first, and each later one splits what that leaves.

A dimension of 8 on a mesh (2, 2):

    (Shard(0), Shard(0))     device 0: 0 1   1: 2 3   2: 4 5   3: 6 7
    (Shard(0), Replicate())  device 0 and 1: 0 1 2 3   2 and 3: 4 5 6 7

As text in DTensor's notation: `S(0),R`, `P` for partial, `S(0, chunks=3)`; one for each mesh axis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

_SHARD = re.compile(r"S\(\s*([0-9]+)\s*(?:,\s*chunks\s*=\s*([1-9][0-9]*)\s*)?\)")


@dataclass(frozen=True)
class Replicate:
    """Every device of the axis holds the same elements."""


@dataclass(frozen=True)
class Shard:
    """The devices of the axis divide dimension `dim` among themselves, in their order.

    Parts differ by at most one element, and the larger ones come first: 9 over 4 devices is
    3, 2, 2, 2, and 2 over 4 is 1, 1, 0, 0. DTensor divides as torch.chunk does, into 3, 3, 3, 0:
    its largest part is no smaller, but fewer devices have work.

    With `chunks`, the dimension is that many equal parts and each of them is divided so: with 3,
    each device gets its share of the query, key and value rows of a fused projection.
    """

    dim: int
    chunks: int = 1

    def __post_init__(self) -> None:
        assert self.dim >= 0, self
        assert self.chunks >= 1, self


@dataclass(frozen=True)
class Partial:
    """The tensor is the sum of what the devices of the axis hold."""


Placement: TypeAlias = Replicate | Shard | Partial
Placements: TypeAlias = tuple[Placement, ...]
Mesh: TypeAlias = tuple[int, ...]


def device_count(mesh: Mesh) -> int:
    return math.prod(mesh)


def coordinates(mesh: Mesh, device: int) -> tuple[int, ...]:
    """Returns the position of the device on each axis."""
    return tuple(int(index) for index in np.unravel_index(device, mesh))


@lru_cache(maxsize=1024)
def axis_groups(mesh: Mesh, axis: int) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of devices that differ in their position on the axis alone, each in its
    order.

    Mesh (2, 3): axis 0 has (0, 3), (1, 4), (2, 5), and axis 1 has (0, 1, 2), (3, 4, 5).
    """
    devices = np.arange(device_count(mesh)).reshape(mesh)
    lines = np.moveaxis(devices, axis, -1).reshape(-1, mesh[axis])
    return tuple(tuple(line) for line in lines.tolist())


def sharding_axes(placements: Placements, dim: int) -> Iterator[tuple[int, Shard]]:
    """Yields the axes that shard the dimension, in the order in which they split it."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and placement.dim == dim:
            yield axis, placement


def show_placements(placements: Placements) -> str:
    """Returns the placements in DTensor's notation: `S(0),R,P`."""
    return ",".join(map(_show, placements))


def parse_placements(text: str) -> Placements:
    """Reads `S(0),R` or `(S(1, chunks=3), P)`. Raises ValueError with a message for the user."""
    inner = text.strip()
    if inner.startswith("(") and inner.endswith(")"):
        inner = inner[1:-1]
    outside_parentheses = re.compile(r",(?![^()]*\))")
    return tuple(_parse(part.strip(), text) for part in outside_parentheses.split(inner))


def _show(placement: Placement) -> str:
    match placement:
        case Shard(dim, 1):
            return f"S({dim})"
        case Shard(dim, chunks):
            return f"S({dim}, chunks={chunks})"
        case Partial():
            return "P"
        case Replicate():
            return "R"


def _parse(part: str, text: str) -> Placement:
    if part == "R":
        return Replicate()
    if part in ("P", "P(sum)"):
        return Partial()
    match = _SHARD.fullmatch(part)
    if match is None:
        raise ValueError(
            f"{text!r}: {part!r} is no placement: write S(0), R or P for each mesh axis, "
            "such as S(0),R"
        )
    return Shard(int(match[1]), int(match[2] or 1))

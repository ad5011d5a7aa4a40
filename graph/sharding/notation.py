"""Placements as text, in three notations. (Shard(0), Replicate()) of a matrix on a mesh (2, 4):

    DTensor     S(0),R                                      a placement for each mesh axis
    Alpa        S0R                                         the mesh axes for each dimension
    MindSpore   device_matrix (2,4), tensor_map (1,-1)      the same; axes count from the right

Only the first can say partial, and chunks, as `S(0, chunks=3)`. The dimension that the others shard
over several axes is `S01` and `(1,0)`. Functions that read raise ValueError with a message for the
user; those that write do if the notation cannot say it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipedream.graph.sharding.placement import (
    Mesh,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    sharding_axes,
)

_SHARD = re.compile(r"S\(\s*([0-9]+)\s*(?:,\s*chunks\s*=\s*([1-9][0-9]*)\s*)?\)")
_ALPA = re.compile(r"R|S([0-9]+)")
_SIZES = r"\(\s*[1-9][0-9]*(?:\s*,\s*[1-9][0-9]*)*\s*,?\s*\)"
_MAPPED = r"(?:-?[0-9]+|\(\s*[0-9]+(?:\s*,\s*[0-9]+)*\s*,?\s*\))"
_MINDSPORE = re.compile(
    rf"\s*device_matrix\s*[=:]?\s*({_SIZES})\s*,?"
    rf"\s*tensor_map\s*[=:]?\s*\(\s*((?:{_MAPPED}(?:\s*,\s*{_MAPPED})*\s*,?)?)\s*\)\s*"
)


def show_placements(placements: Placements) -> str:
    """In DTensor's notation: `S(0),R,P`."""
    return ",".join(map(_show, placements))


def parse_placements(text: str) -> Placements:
    """`S(0),R` or `(S(1, chunks=3), P)`."""
    inner = text.strip()
    if inner.startswith("(") and inner.endswith(")"):
        inner = inner[1:-1]
    return tuple(_parse(part.strip(), text) for part in _outside_parentheses(inner))


def show_alpa(placements: Placements, dims: int) -> str:
    """The `dims` dimensions of a tensor in Alpa's notation: `S01R`."""
    assert len(placements) <= 10, "an axis is one digit"
    return "".join(
        "S" + "".join(map(str, axes)) if axes else "R"
        for axes in _axes_by_dim(placements, dims, "Alpa's notation")
    )


def parse_alpa(text: str, axes: int) -> Placements:
    """`S0R`, `RS1` or `S01R` on a mesh of so many axes."""
    parts = list(_ALPA.finditer(text.strip()))
    if not parts or "".join(part[0] for part in parts) != text.strip():
        raise ValueError(
            f"{text!r} is no sharding spec: write R or S and its mesh axes for each dimension, "
            "such as S0R or S01R"
        )
    return _by_axis([tuple(map(int, part[1] or "")) for part in parts], axes, text)


def show_mindspore(mesh: Mesh, placements: Placements, dims: int) -> str:
    """Mesh and placements in MindSpore's notation."""
    last = len(mesh) - 1
    mapped = [
        [last - axis for axis in axes]
        for axes in _axes_by_dim(placements, dims, "MindSpore's notation")
    ]
    entries = [
        "-1" if not axes else str(axes[0]) if len(axes) == 1 else _numbers(axes) for axes in mapped
    ]
    return f"device_matrix {_numbers(mesh)}, tensor_map ({','.join(entries)})"


def parse_mindspore(text: str) -> tuple[Mesh, Placements]:
    """`device_matrix (2,4), tensor_map (1,-1)` as mesh and placements."""
    match = _MINDSPORE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no layout: write device_matrix (2,4), tensor_map (1,-1)")
    mesh = tuple(map(int, re.findall(r"[0-9]+", match[1])))
    numbers = [
        [int(each) for each in re.findall(r"-?[0-9]+", entry)]
        for entry in re.findall(_MAPPED, match[2])
    ]
    last = len(mesh) - 1
    for mapped in numbers:
        if any(each > last or each < -1 for each in mapped):
            raise ValueError(
                f"{text!r}: the device matrix has axes 0 to {last}, counted from the right; "
                "write -1 for a dimension that is not sharded"
            )
    axes = [tuple(last - each for each in mapped if each >= 0) for mapped in numbers]
    return mesh, _by_axis(axes, len(mesh), text)


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


def _outside_parentheses(text: str) -> list[str]:
    """Split at the commas that are not within parentheses."""
    return re.split(r",(?![^()]*\))", text)


def _axes_by_dim(placements: Placements, dims: int, notation: str) -> list[list[int]]:
    """The axes that shard each dimension. Raises ValueError if that does not say everything."""
    for placement in placements:
        if placement == Partial() or (isinstance(placement, Shard) and placement.chunks > 1):
            raise ValueError(
                f"{notation} cannot say {_show(placement)}: write {show_placements(placements)}"
            )
        assert not isinstance(placement, Shard) or placement.dim < dims, (placements, dims)
    return [[axis for axis, _ in sharding_axes(placements, dim)] for dim in range(dims)]


def _by_axis(axes_by_dim: Sequence[tuple[int, ...]], axes: int, text: str) -> Placements:
    placements: list[Placement] = [Replicate()] * axes
    for dim, sharding in enumerate(axes_by_dim):
        if list(sharding) != sorted(sharding):
            raise ValueError(
                f"{text!r}: dimension {dim} is split by the later axis first: name the axes from "
                "left to right, such as S01 or, counted from the right, (1,0)"
            )
        for axis in sharding:
            if axis >= axes:
                raise ValueError(
                    f"{text!r}: there is no mesh axis {axis}: the mesh has axes 0 to {axes - 1}"
                )
            if placements[axis] != Replicate():
                raise ValueError(
                    f"{text!r}: mesh axis {axis} is named twice: an axis shards one dimension"
                )
            placements[axis] = Shard(dim)
    return tuple(placements)


def _numbers(numbers: Sequence[int]) -> str:
    return f"({','.join(map(str, numbers))})"

"""Placements as text in DTensor's notation: `S(0),R`, `P` for partial, `S(0, chunks=3)`; one for
each mesh axis. The function that reads raises ValueError with a message for the user.
"""

from __future__ import annotations

import re

from pipedream.graph.placements.placement import Partial, Placement, Placements, Replicate, Shard

_SHARD = re.compile(r"S\(\s*([0-9]+)\s*(?:,\s*chunks\s*=\s*([1-9][0-9]*)\s*)?\)")


def show_placements(placements: Placements) -> str:
    """Returns the placements in DTensor's notation: `S(0),R,P`."""
    return ",".join(map(_show, placements))


def parse_placements(text: str) -> Placements:
    """Reads `S(0),R` or `(S(1, chunks=3), P)`."""
    inner = text.strip()
    if inner.startswith("(") and inner.endswith(")"):
        inner = inner[1:-1]
    return tuple(_parse(part.strip(), text) for part in _outside_parentheses(inner))


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
    """Splits the text at the commas that are not within parentheses."""
    return re.split(r",(?![^()]*\))", text)

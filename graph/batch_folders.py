"""A folder with profiles of one model at several batch sizes: `batch-1`, `batch-2` and so on."""

from __future__ import annotations

import re
from pathlib import Path

from pipedream.graph.model import Graph

TABLE = "batch_sizes.csv"
"""What pd-profile writes beside the profiles, and pd-optimize beside the plan."""

_NAME = re.compile(r"batch-([1-9][0-9]*)")


def folder_of(folder: Path, batch_size: int) -> Path:
    """Where the profile at that size is."""
    return folder / f"batch-{batch_size}"


def sizes_in(folder: Path) -> list[int]:
    """The batch sizes that there are profiles of, the smallest first."""
    found = (_NAME.fullmatch(path.parent.name) for path in folder.glob("batch-*/graph.txt"))
    return sorted(int(match[1]) for match in found if match)


def difference(one: Graph, size: int, other: Graph, other_size: int) -> str | None:
    """The first node in which two graphs differ, for a person; None where the structure is one.

    `size` and `other_size` are the batch sizes that they were profiled at.
    """
    if one.fingerprint == other.fingerprint:
        return None
    for name, found in zip(one.order, other.order, strict=False):
        here, there = one.nodes[name].description, other.nodes[found].description
        if here != there:
            return f"{name} is {here} at {size} and {there} at {other_size}"
        if _inputs(one, name) != _inputs(other, found):
            return f"{name} ({here}) has other inputs at {other_size} than at {size}"
    return f"{len(one.nodes)} nodes at {size} and {len(other.nodes)} at {other_size}"


def _inputs(graph: Graph, name: str) -> list[int]:
    return sorted(map(graph.order.index, graph.predecessors[name]))

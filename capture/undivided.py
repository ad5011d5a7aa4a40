"""Says where a model cannot be divided, because a write in place holds much of it together."""

from __future__ import annotations

from collections import Counter

from pipedream.capture.captured import Captured
from pipedream.capture.errors.capture_errors import place_of
from pipedream.capture.grouping import IN_PLACE, operator_name
from pipedream.capture.rewrites.writes import targets

_LARGE = 0.25
"""A node with more than this part of the operators is worth a word."""


def undivided(captured: Captured) -> str:
    """Returns a line on the largest node that consists of all that shares memory with a write, with
    the place of the write and what to write instead; empty if it has few of the operators.
    """
    nodes, owner = captured.module.graph.nodes, captured.owner
    sizes = Counter(owner[n.name] for n in nodes if n.op != "placeholder" and n.name in owner)
    described = captured.graph.nodes
    in_place = [name for name in sizes if described[name].description == IN_PLACE]
    largest = max(in_place, key=sizes.__getitem__, default="")
    if not in_place or sizes[largest] <= _LARGE * sizes.total():
        return ""
    inside = (each for each in nodes if owner.get(each.name) == largest)
    writer = next(each for each in inside if targets(each))
    return (
        f"{place_of(writer)}{largest} has {sizes[largest] / sizes.total():.0%} of the operators, "
        f"and stays on one stage: it is all that uses the memory that {operator_name(writer)} "
        "writes into; make a new tensor instead, with torch.where, torch.cat or clone"
    )

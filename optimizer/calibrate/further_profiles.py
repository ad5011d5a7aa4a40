"""Several profiles of one model (`--again`): the mean of their times, and how they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph
from pipedream.graph.profile import Profile, read_profile_of


def levels_of(profile: Profile, graph: Graph, others: Sequence[Path]) -> tuple[float, ...]:
    """Returns the logarithm of how many times as long the passes of each further profile took.

    Raises UserError if one was not measured as `profile` of `graph` was.
    """
    return tuple(_level(profile, read_profile_of(path, graph), path) for path in others)


def _level(profile: Profile, other: Profile, path: Path) -> float:
    differing = {
        "batch size": (profile.batch_size, other.batch_size),
        "device": (profile.machine.device_name, other.machine.device_name),
        "threads": (profile.machine.threads, other.machine.threads),
        "workers": (profile.machine.workers, other.machine.workers),
        "compile": (profile.compile, other.compile),
        "estimated": (profile.estimated is not None, other.estimated is not None),
    }
    for name, (own, its) in differing.items():
        if own != its:
            raise UserError(
                f"--again {path}: its {name} is {its}, and that of the profile {own}: give one that"
                " was measured in the same way"
            )
    seconds, further = _passes(profile), _passes(other)
    if not seconds or not further:
        raise UserError(f"--again {path}: one of the profiles says that passes take no time")
    return math.log(further / seconds)


def _passes(profile: Profile) -> float:
    return profile.totals.forward_seconds + profile.totals.backward_seconds


def at_their_mean(graph: Graph, levels: Sequence[float]) -> Graph:
    """The graph with times as long as the mean (of the logarithms) of its profile and of those."""
    if not levels:
        return graph
    factor = math.exp(fmean((0.0, *levels)))
    changed = (
        replace(
            node,
            forward_seconds=factor * node.forward_seconds,
            backward_seconds=factor * node.backward_seconds,
        )
        for node in graph.nodes.values()
    )
    return graph.with_nodes(changed)

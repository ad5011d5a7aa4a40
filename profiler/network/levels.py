"""The levels of the cluster, and the pairs and groups of ranks to measure at each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipedream.graph.command import UserError
from pipedream.graph.timeline import evenly

_NAMES = ("device", "machine")
_MOST_PAIRS = 8
_MOST_GROUPS = 4

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class NetworkLevel:
    """A level of `count` components in a cluster of `size` ranks.

    Ranks in the same position of neighbouring components are `stride` apart.
    """

    name: str
    count: int
    stride: int
    size: int

    @property
    def groups(self) -> list[Ranks]:
        """Returns groups of ranks that differ only at this level: a sample of the cluster."""
        return evenly(self._all_groups(), _MOST_GROUPS)

    @property
    def pairs(self) -> list[Ranks]:
        """Returns neighbouring ranks of such groups: a sample from the whole cluster."""
        pairs = [pair for group in self._all_groups() for pair in pairwise(group)]
        return evenly(pairs, _MOST_PAIRS)

    def _all_groups(self) -> list[Ranks]:
        firsts = [rank for rank in range(self.size) if rank // self.stride % self.count == 0]
        reach = self.count * self.stride
        return [tuple(range(first, first + reach, self.stride)) for first in firsts]


def levels(machines: Sequence[int]) -> list[NetworkLevel]:
    """Returns the levels, innermost first, with the given numbers of components (`--machines`)."""
    size = math.prod(machines)
    names = [*_NAMES, *(f"level{index + 1}" for index in range(len(_NAMES), len(machines)))]
    return [
        NetworkLevel(names[index], count, math.prod(machines[:index]), size)
        for index, count in enumerate(machines)
    ]


def levels_of(hosts: Sequence[str]) -> list[NetworkLevel]:
    """Returns the levels by the host name of each rank: the devices of a host, then the hosts.

    There is one level if all ranks are on one host or each on its own. Raises UserError if hosts
    have different numbers of ranks, or if the ranks of a host are not consecutive.
    """
    names = list(dict.fromkeys(hosts))
    each = len(hosts) // len(names)
    if list(hosts) != [name for name in names for _ in range(each)]:
        counts = ", ".join(f"{hosts.count(name)} on {name}" for name in names)
        raise UserError(
            f"--network: the ranks do not fill their hosts evenly, one after the other ({counts}): "
            "start as many on each, or say with --machines which belong together"
        )
    if len(names) > 1 and each == 1:
        return [NetworkLevel("machine", len(names), 1, len(hosts))]
    return levels((each, len(names)) if len(names) > 1 else (each,))


def parse_machines(text: str, ranks: int) -> tuple[int, ...]:
    """Parses `2,2` for 4 ranks. Raises UserError."""
    try:
        counts = tuple(int(count) for count in text.split(","))
    except ValueError:
        raise UserError(f"--machines {text}: give whole numbers, as 4,2") from None
    if min(counts) < 2:
        raise UserError(
            f"--machines {text}: a level of fewer than 2 components has nothing to measure: "
            "leave that level out"
        )
    if math.prod(counts) != ranks:
        raise UserError(
            f"--machines {text}: that is {math.prod(counts)} devices, and {ranks} ranks were "
            "started: start one rank per device"
        )
    return counts

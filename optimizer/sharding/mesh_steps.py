"""The divisions that are one step away from another where each stage may have a mesh of its own: a
cut moves, a stage has another mesh, devices change their stage, two stages become one, one two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple, TypeAlias

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.choose.division import Division
from pipedream.optimizer.choose.neighbours import Neighbours
from pipedream.optimizer.cuts.antichains import bits
from pipedream.optimizer.cuts.planning_graph import PlanningGraph

_PLACES = 5
"""After how many nodes a stage is cut in two, at most."""

_FEW = 8
"""Devices that two stages share in whatever way."""


class Team(NamedTuple):
    """A stage's workers: the number of their mesh, and how many there are."""

    mesh: int
    replicas: int


Teams: TypeAlias = tuple[Team, ...]
"""By stage."""


class MeshSteps:
    """The steps on a cluster; `sizes`: the devices of each mesh."""

    def __init__(self, graph: PlanningGraph, cluster: Cluster, sizes: Sequence[int]) -> None:
        self.graph, self.cluster, self.sizes = graph, cluster, sizes
        self.plain = Neighbours(graph, cluster, straight=False)

    def of(self, division: Division) -> Iterator[Division]:
        yield from self.plain.moved_cuts(division)
        teams = teams_of(division)
        for changed in dict.fromkeys((*self._other_meshes(teams), *self._moved_devices(teams))):
            yield from self._placed(division, division.downsets, changed)
        for downsets, changed in (*self._joined(division, teams), *self._split(division, teams)):
            yield from self._placed(division, downsets, changed)

    def placed(self, downsets: tuple[int, ...], teams: Teams, slack: int = 0) -> Division | None:
        """The division with these workers, one after the other, each within a component of the
        innermost level; None if there are not enough devices.
        """
        inner, begin, ranks = self.cluster.machines[0], 0, []
        for mesh, replicas in teams:
            size, own = self.sizes[mesh], []
            for _ in range(replicas):
                if begin % inner + size > inner:
                    begin += inner - begin % inner
                own.append(begin)
                begin += size
            ranks.append(tuple(own))
        if begin > self.cluster.devices:
            return None
        return Division(downsets, tuple(ranks), slack, tuple(team.mesh for team in teams))

    def _placed(
        self, division: Division, downsets: tuple[int, ...], teams: Teams
    ) -> Iterator[Division]:
        found = self.placed(downsets, teams, division.slack)
        if found is not None:
            yield found

    def _devices(self, team: Team) -> int:
        return self.sizes[team.mesh] * team.replicas

    def _on(self, devices: int) -> Iterator[Team]:
        """All that so many devices can be for a stage."""
        for mesh, size in enumerate(self.sizes):
            if size <= devices:
                yield Team(mesh, devices // size)

    def _other_meshes(self, teams: Teams) -> Iterator[Teams]:
        """One stage on other meshes of as many devices."""
        for stage, team in enumerate(teams):
            for other in self._on(self._devices(team)):
                if other != team:
                    yield (*teams[:stage], other, *teams[stage + 1 :])

    def _moved_devices(self, teams: Teams) -> Iterator[Teams]:
        """Devices from one stage, and those to spare, to another, either of which may then have
        another mesh; or to none.
        """
        spare = self.cluster.devices - sum(map(self._devices, teams))
        for stage, team in enumerate(teams):
            for other in self._on(self._devices(team) + spare) if spare else ():
                if other != team:
                    yield (*teams[:stage], other, *teams[stage + 1 :])
            if team.replicas > 1:
                fewer = Team(team.mesh, team.replicas - 1)
                yield (*teams[:stage], fewer, *teams[stage + 1 :])
        for source, target in permutations(range(len(teams)), 2):
            devices = self._devices(teams[source])
            for count in sorted({1, self.sizes[teams[source].mesh], devices // 2} - {0}):
                for own in self._on(devices - count):
                    for other in self._on(self._devices(teams[target]) + count + spare):
                        changed = list(teams)
                        changed[source], changed[target] = own, other
                        yield tuple(changed)

    def _joined(self, division: Division, teams: Teams) -> Iterator[tuple[tuple[int, ...], Teams]]:
        downsets = division.downsets
        for at in range(len(teams) - 1):
            for both in self._on(self._devices(teams[at]) + self._devices(teams[at + 1])):
                yield downsets[:at] + downsets[at + 1 :], (*teams[:at], both, *teams[at + 2 :])

    def _split(self, division: Division, teams: Teams) -> Iterator[tuple[tuple[int, ...], Teams]]:
        downsets, before = division.downsets, 0
        for at, team in enumerate(teams):
            nodes, devices = list(bits(downsets[at] & ~before)), self._devices(team)
            for first in self._shares(devices):
                places = self._places(nodes, first / devices)
                for one in self._on(first):
                    for other in self._on(devices - first):
                        for count in places:
                            middle = before | sum(1 << node for node in nodes[:count])
                            changed = (*teams[:at], one, other, *teams[at + 1 :])
                            yield (*downsets[:at], middle, *downsets[at:]), changed
            before = downsets[at]

    @staticmethod
    def _shares(devices: int) -> list[int]:
        """How many of so many devices the first of two stages may have."""
        if devices <= _FEW:
            return list(range(1, devices))
        return sorted({1, devices // 2, devices - 1})

    def _places(self, nodes: Sequence[int], share: float) -> list[int]:
        """After how many of the nodes to cut, so that those before have about this share of the
        work.
        """
        seconds = self.graph.compute_seconds[list(nodes)].cumsum()
        best = int((seconds < share * seconds[-1]).sum()) + 1
        near = range(best - _PLACES // 2, best + _PLACES // 2 + 1)
        return [count for count in near if 0 < count < len(nodes)]


def teams_of(division: Division) -> Teams:
    pairs = zip(division.meshes, division.replicas, strict=True)
    return tuple(Team(mesh, replicas) for mesh, replicas in pairs)

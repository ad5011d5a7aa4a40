"""The process groups of a stage whose replicas are teams of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import torch.distributed as dist
from torch import Tensor

from pipedream.comm.exchange import ExchangeGroup, connect_exchange
from pipedream.comm.redistribute import MeshGroups, gather_tiles
from pipedream.comm.transport import connect_several
from pipedream.graph.placements.placement import Mesh, coordinates, device_count
from pipedream.graph.placements.regions import Region
from pipedream.graph.plan import WorkerGroup
from pipedream.sharding.tiles import Transfer


@dataclass(frozen=True)
class TeamGroups:
    """Those of one rank.

    `mesh`: to redistribute within the team. `whole`: the team. `sums`: for a gradient that is
    partial on these axes, all replicas of the devices that hold terms of it; None for this rank
    alone.
    """

    mesh: MeshGroups
    whole: ExchangeGroup | None
    sums: Mapping[tuple[int, ...], dist.ProcessGroup | None]

    def gather(self, local: Tensor, region: Region, gathers: Sequence[Transfer]) -> None:
        """Completes what this rank holds of a value; see `gather_tiles`. Raises PeerLost."""
        assert self.whole is not None
        assert self.mesh.device is not None
        gather_tiles(local, region, gathers, self.mesh.device, self.mesh.ranks, self.whole)


def make_team_groups(mesh: Mesh, teams: Sequence[WorkerGroup]) -> TeamGroups | None:
    """Makes the groups of this rank; None if it is in no team. `teams`: of each replica of the
    stage.

    Every rank of the run has to make them, in the same order; raises PeerLost.
    """
    here = dist.get_rank()
    my_team = next((team for team in teams if here in team.ranks), None)
    meshes = {team: MeshGroups(mesh, team.ranks) for team in teams}
    wholes = {team: connect_exchange(team.ranks) if len(team.ranks) > 1 else None for team in teams}
    sums: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    numbers = range(len(mesh))
    subsets = chain.from_iterable(combinations(numbers, count) for count in range(len(mesh) + 1))
    for axes in subsets:
        for devices in devices_along(mesh, axes):
            ranks = [team.ranks[device] for team in teams for device in devices]
            group = connect_several(ranks)
            if here in ranks:
                sums[axes] = group
    return None if my_team is None else TeamGroups(meshes[my_team], wholes[my_team], sums)


def devices_along(mesh: Mesh, axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the groups of devices that differ in their positions on these axes alone."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device in range(device_count(mesh)):
        at = coordinates(mesh, device)
        others = tuple(place for axis, place in enumerate(at) if axis not in axes)
        groups.setdefault(others, []).append(device)
    return [tuple(group) for group in groups.values()]

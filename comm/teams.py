"""The communicators of a stage whose replicas are teams of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from pipedream.comm.communicators import Communicators
from pipedream.comm.exchange import ExchangeGroup
from pipedream.comm.redistribute import MeshGroups, along_axes, gather_tiles
from pipedream.graph.placements.placement import Mesh, coordinates, device_count
from pipedream.graph.placements.regions import Region
from pipedream.schedule.channel import Communicator, Use, among
from pipedream.sharding.tiles import Transfer

Axes = tuple[int, ...]


@dataclass(frozen=True)
class Team:
    """The ranks that are a replica of a stage, for one of them: `ranks` of its devices, this one is
    `device`. `replicas`: the ranks of every replica.
    """

    mesh: Mesh
    ranks: Sequence[int]
    device: int
    replicas: Sequence[Sequence[int]]

    def adding_up(self, axes: Axes) -> list[int]:
        """Returns the ranks of all replicas that hold terms of a gradient of this device which is
        partial on these axes.
        """
        along = next(each for each in devices_along(self.mesh, axes) if self.device in each)
        return [ranks[device] for ranks in self.replicas for device in along]

    def communicators(self, partial: Collection[Axes]) -> Iterator[Communicator]:
        """Yields what it needs. `partial`: the axes on which gradients are to be added up."""
        for _, devices in along_axes(self.mesh, self.device):
            yield among((self.ranks[each] for each in devices), Use.EXCHANGE)
        if len(self.ranks) > 1:
            yield among(self.ranks, Use.EXCHANGE)
        for axes in partial:
            if len(ranks := self.adding_up(axes)) > 1:
                yield among(ranks, Use.SUMS)


@dataclass(frozen=True)
class TeamGroups:
    """Those of one rank.

    `mesh`: to redistribute within the team. `whole`: the team. `sums`: for a gradient that is
    partial on these axes, all replicas of the devices that hold terms of it; None for this rank
    alone.
    """

    mesh: MeshGroups
    whole: ExchangeGroup | None
    sums: Mapping[Axes, dist.ProcessGroup | None]

    @staticmethod
    def of(team: Team, partial: Collection[Axes], communicators: Communicators) -> TeamGroups:
        return TeamGroups(
            MeshGroups(team.mesh, team.ranks, team.device, communicators.exchange),
            communicators.exchange(team.ranks),
            {axes: communicators.sums(team.adding_up(axes)) for axes in partial},
        )

    def gather(self, local: Tensor, region: Region, gathers: Sequence[Transfer]) -> None:
        """Completes what this rank holds of a value; see `gather_tiles`. Raises PeerLost."""
        assert self.whole is not None
        gather_tiles(local, region, gathers, self.mesh.device, self.mesh.ranks, self.whole)


def devices_along(mesh: Mesh, axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the groups of devices that differ in their positions on these axes alone."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device in range(device_count(mesh)):
        at = coordinates(mesh, device)
        others = tuple(place for axis, place in enumerate(at) if axis not in axes)
        groups.setdefault(others, []).append(device)
    return [tuple(group) for group in groups.values()]

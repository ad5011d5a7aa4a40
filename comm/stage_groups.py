"""Who adds up the gradients of a rank's stages, and over which communicators."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from pipedream.comm.communicators import Communicators
from pipedream.comm.teams import Axes, Team, TeamGroups
from pipedream.comm.tied_sums import TiedSums
from pipedream.graph.placements.placement import Mesh
from pipedream.graph.plan import RankAssignment
from pipedream.schedule.channel import Communicator, Use, among


@dataclass(frozen=True)
class StageGroups:
    """Says who adds up gradients: the replicas of a stage, if several; of the parameters that are
    `tied` to those of other stages, which `sums` has, all that hold them. `team`: if the stage has
    a mesh; then the `replicas` are those of this rank's device.
    """

    replicas: dist.ProcessGroup | None
    tied: frozenset[str] = frozenset()
    sums: TiedSums | None = None
    team: TeamGroups | None = None

    def adding_up(self, axes: Axes) -> dist.ProcessGroup | None:
        """Returns the group that adds up what is partial on these axes; None for one rank."""
        return self.replicas if self.team is None else self.team.sums[axes]


@dataclass(frozen=True)
class SummingRanks:
    """The ranks that add up gradients with `rank`. `meshes`: of stages that have one, by number;
    `partial`: for those of this rank the axes on which gradients are to be added up. `tied`: the
    stages that hold a parameter, where there are several.
    """

    assignment: RankAssignment
    rank: int
    tied: Mapping[str, Sequence[int]]
    meshes: Mapping[int, Mesh] = field(default_factory=dict)
    partial: Mapping[int, Collection[Axes]] = field(default_factory=dict)

    def communicators(self) -> Iterator[Communicator]:
        """Yields what this rank needs."""
        for stage in self._stages():
            if (team := self._team(stage)) is not None:
                yield from team.communicators(self._axes(stage))
            elif len(ranks := self._ranks(stage)) > 1:
                yield among(ranks, Use.SUMS)
        for name in self.tied:
            if len(holders := self._holders(name)) > 1 and self.rank in holders:
                yield among(holders, Use.TIED_SUMS)

    def groups(self, communicators: Communicators) -> dict[int, StageGroups]:
        """Returns those of each stage of this rank, by number."""
        holders = {
            name: [stage for stage in stages if self.rank in self._ranks(stage)]
            for name, stages in self.tied.items()
            if self.rank in self._holders(name)
        }
        tied_groups = {
            name: communicators.sums(self._holders(name), Use.TIED_SUMS) for name in holders
        }
        sums = TiedSums(holders, tied_groups) if holders else None
        groups = {}
        for stage in self._stages():
            names = frozenset(name for name in self.tied if stage in self.tied[name])
            team = self._team(stage)
            on_mesh = None
            if team is None:
                replicas = communicators.sums(self._ranks(stage))
            else:
                on_mesh = TeamGroups.of(team, self._axes(stage), communicators)
                replicas = on_mesh.sums[()]
            groups[stage] = StageGroups(replicas, names, sums if names else None, on_mesh)
        return groups

    def _stages(self) -> list[int]:
        return [stage for stage in range(len(self.assignment)) if self.rank in self._ranks(stage)]

    def _ranks(self, stage: int) -> list[int]:
        return [rank for worker in self.assignment[stage] for rank in worker.ranks]

    def _holders(self, name: str) -> set[int]:
        return {rank for stage in self.tied[name] for rank in self._ranks(stage)}

    def _axes(self, stage: int) -> set[Axes]:
        """What is not partial is added up over the replicas alone."""
        return {(), *self.partial.get(stage, ())}

    def _team(self, stage: int) -> Team | None:
        if stage not in self.meshes:
            return None
        replicas = [worker.ranks for worker in self.assignment[stage]]
        ranks = next(ranks for ranks in replicas if self.rank in ranks)
        return Team(self.meshes[stage], ranks, ranks.index(self.rank), replicas)

"""A model as one device of a worker sees it, for workers of one device and for each mesh; and as a
plan sees it whose stages have different ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipedream.graph.model import Graph
from pipedream.graph.profile import Footprint, Profile
from pipedream.optimizer.choose.division import Division
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.sharding.boundaries import Boundaries
from pipedream.optimizer.sharding.model_sharding import ModelSharding
from pipedream.optimizer.sharding.team_graph import DividedStage, team_footprints, team_graph


@dataclass(frozen=True)
class View:
    """`graph`, `footprints`: of one device; `sharding`: None for workers of one device."""

    sharding: ModelSharding | None
    graph: Graph
    footprints: Mapping[str, Footprint] | None

    @property
    def devices(self) -> int:
        return 1 if self.sharding is None else self.sharding.devices


@dataclass(frozen=True)
class Views:
    """`request`: for single devices; `views`: the first is that of single devices."""

    request: Request
    views: Sequence[View]
    boundaries: Boundaries

    @staticmethod
    def of(request: Request, shardings: Sequence[tuple[ModelSharding, Request]]) -> Views:
        """`shardings`: each with its request for teams."""
        own = [View(None, request.graph, request.footprints)]
        own += [View(each, teams.graph, teams.footprints) for each, teams in shardings]
        return Views(request, own, Boundaries.of([each.sharding for each in own]))

    def with_shardings(self, shardings: Sequence[ModelSharding], profile: Profile) -> Views:
        """The same with other divisions of the same operators on the same meshes."""
        own = [self.views[0]]
        for before, sharding in zip(self.views[1:], shardings, strict=True):
            if sharding is before.sharding:
                own.append(before)
            else:
                teams = of_teams(self.request, profile, sharding)
                own.append(View(sharding, teams.graph, teams.footprints))
        boundaries = replace(self.boundaries, shardings=[each.sharding for each in own])
        return Views(self.request, own, boundaries)

    def priced(self, division: Division) -> Request:
        """The request with the figures that each node has on the mesh of its stage, and those of
        what crosses between stages.
        """
        stage_of = self.stage_of(division)
        of_node = {name: self.views[division.meshes[s]] for name, s in stage_of.items()}
        nodes = {name: of_node[name].graph.nodes[name] for name in self.request.graph.nodes}
        crossing = self.boundaries.seconds(stage_of, division.meshes)
        for (name, backward), seconds in crossing.items():
            which = "backward_seconds" if backward else "forward_seconds"
            taken = max(0.0, getattr(nodes[name], which) + seconds)
            nodes[name] = replace(nodes[name], **{which: taken})
        footprints = None
        if self.request.footprints is not None:
            footprints = {
                name: (of_node[name].footprints or {})[name] for name in self.request.footprints
            }
        request = self.request
        if any(division.meshes):  # as in `of_teams`
            own = tuple(self.views[mesh].devices for mesh in division.meshes)
            request = replace(request, programs=True, host_bandwidth=None, devices=own)
        return request.priced_as(request.graph.with_figures(nodes), footprints)

    def divided(self, division: Division) -> list[DividedStage]:
        """What divides its stages."""
        taken = self.boundaries.taken(self.stage_of(division), division.meshes)
        own = (self.views[mesh].sharding for mesh in division.meshes)
        return [DividedStage(*pair) for pair in zip(own, taken, strict=True)]

    def stage_of(self, division: Division) -> dict[str, int]:
        """The stage of each node of the graph."""
        cuts = division.cuts(self.request.planning)
        stages = [cuts.nodes(stage, stage + 1) for stage in range(len(division.ranks))]
        return self.request.planning.stage_of(stages)


def of_teams(request: Request, profile: Profile, sharding: ModelSharding) -> Request:
    """The request for teams of devices, in place of single ones."""
    footprints = request.footprints
    return replace(
        request,
        graph=team_graph(request.graph, profile, sharding),
        cluster=sharding.teams,
        footprints=None if footprints is None else team_footprints(footprints, sharding),
        programs=True,
        devices=(sharding.devices,),
        host_bandwidth=None,  # nothing moves what programs save
        hurried=request.has_many_devices,
    )

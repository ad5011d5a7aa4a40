"""The groups of meshes in processes of gloo, as a run has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from pipedream.comm.communicators import Communicators
from pipedream.comm.redistribute import MeshGroups
from pipedream.comm.teams import Team, TeamGroups
from pipedream.graph.placements.placement import Mesh


def team_groups(meshes: Sequence[tuple[Mesh, Sequence[int]]]) -> list[TeamGroups | None]:
    """Those of this rank for each mesh on these ranks; None where it is not among them. Called by
    all ranks.
    """
    here = dist.get_rank()
    teams = [
        Team(mesh, ranks, list(ranks).index(here), [ranks]) if here in ranks else None
        for mesh, ranks in meshes
    ]
    wanted = (each for team in teams if team for each in team.communicators([()]))
    communicators = Communicators.connect(wanted, torch.device("cpu"), "gloo", 60.0)
    return [team and TeamGroups.of(team, [()], communicators) for team in teams]


def mesh_groups(meshes: Sequence[tuple[Mesh, Sequence[int]]]) -> list[MeshGroups | None]:
    return [groups and groups.mesh for groups in team_groups(meshes)]

"""A model on the meshes of an existing plan, divided as the plan says."""

from __future__ import annotations

from collections import Counter

from pipedream.graph.errors import UserError
from pipedream.graph.placements.operators import OperatorProfile, estimated_seconds
from pipedream.graph.placements.placement import Mesh, Placements
from pipedream.graph.placements.requests import Requests
from pipedream.graph.plan import Plan
from pipedream.graph.profile import Profile
from pipedream.optimizer.choose.chooser import priced_outcome
from pipedream.optimizer.choose.division import Division
from pipedream.optimizer.search.outcome import Outcome
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.sharding.accounting import accounting
from pipedream.optimizer.sharding.boundaries import Pass
from pipedream.optimizer.sharding.mesh_search import MeshTrials
from pipedream.optimizer.sharding.model_sharding import ModelSharding, rate_on, whole_ends
from pipedream.optimizer.sharding.team_graph import work_shares
from pipedream.optimizer.sharding.views import Views, of_teams
from pipedream.sharding.assignment import Assignment, LinkedMesh
from pipedream.sharding.planned import planned_strategies
from pipedream.sharding.propagate import propagate

_MOST_SLACK = 16
"""Quarters of what stages have in flight, that a plan may have more than it needs."""


def planned_views(
    plan: Plan, request: Request, operators: OperatorProfile, profile: Profile
) -> tuple[Views, Division]:
    """The views of its meshes, and its division. `request`: for single devices of its cluster.
    Raises UserError for placements that cannot be met.
    """
    meshes = sorted({stage.mesh for stage in plan.stages if stage.mesh is not None})
    found = []
    for mesh in meshes:
        assignment = _assignment(plan, mesh, operators)
        often = accounting(request, mesh).minibatches
        sharding = ModelSharding(plan.cluster, operators, assignment, None, often)
        found.append((sharding, of_teams(request, profile, sharding)))
    numbers = {mesh: number for number, mesh in enumerate(meshes, start=1)}
    own = tuple(0 if stage.mesh is None else numbers[stage.mesh] for stage in plan.stages)
    leaders = tuple(tuple(team.leader for team in stage.teams) for stage in plan.stages)
    division = Division.of(plan, request.planning)._replace(ranks=leaders, meshes=own)
    return Views.of(request, found), division


def device_work(views: Views, division: Division) -> tuple[dict[Pass, float], Counter[Pass]]:
    """Of each node, forward and backward: the part of its seconds that a device of its stage works,
    and the seconds of messages within the stage, both of the device that was profiled.
    """
    stage_of, whole = views.stage_of(division), views.request.graph.nodes
    by_mesh = [None if v.sharding is None else work_shares(v.sharding) for v in views.views]
    shares: dict[Pass, float] = {}
    messages: Counter[Pass] = Counter()
    for name, node in views.priced(division).graph.nodes.items():
        own = by_mesh[division.meshes[stage_of[name]]] if name in stage_of else None
        for backward, which in ((False, "forward_seconds"), (True, "backward_seconds")):
            key = name, backward
            shares[key] = 1.0 if own is None else own.get(key, 1.0)
            worked = getattr(whole[name], which) * shares[key]
            messages[key] = getattr(node, which) - worked
    return shares, messages


def priced_again(plan: Plan, views: Views, division: Division) -> Outcome:
    """What the plan takes by the views, with as much in flight as it has. Raises UserError where
    that takes too long to simulate.
    """
    trials = MeshTrials(views)
    slacks = (division._replace(slack=quarters) for quarters in range(_MOST_SLACK))
    tried = (trials.tried(each) for each in slacks)
    found = None
    for trial in filter(None, tried):
        found = found or trial
        if trial.plan.max_in_flight == plan.max_in_flight:
            found = trial
            break
    if found is None:
        raise UserError("the plan of the run takes too long to simulate: plan anew")
    return priced_outcome(views.priced(found.division), found, 0.0)


def _assignment(plan: Plan, mesh: Mesh, operators: OperatorProfile) -> Assignment:
    """How the stages on this mesh divide their operators; what divides others is as it may be."""
    stages = [stage for stage in plan.stages if stage.mesh == mesh]
    placed = [stage.placements for stage in stages if stage.placements is not None]
    graph, axes = operators.graph, len(mesh)
    texts = [each for own in placed for each in own.operators]
    decided = planned_strategies(texts, graph, operators.nodes, mesh)
    parameters: dict[str, Placements] = {}
    for own in placed:
        parameters |= own.requests(axes).parameters
    linked = LinkedMesh.of(mesh, stages[0].teams[0].ranks, plan.cluster)
    seconds = estimated_seconds(graph, rate_on(operators, plan.cluster))
    requests = Requests(parameters, whole_ends(operators, axes))
    return propagate(graph, linked, requests, seconds, decided)

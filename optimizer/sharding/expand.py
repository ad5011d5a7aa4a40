"""A plan for teams, with the devices of each team written into it."""

from __future__ import annotations

from pipedream.graph.model import Graph
from pipedream.graph.placements.placement import show_placements
from pipedream.graph.placements.requests import PlacementTexts
from pipedream.graph.plan import Plan
from pipedream.graph.profile import Profile
from pipedream.optimizer.sharding.model_sharding import ModelSharding


def expand(plan: Plan, sharding: ModelSharding, profile: Profile, whole: Graph) -> Plan:
    """Of a plan whose ranks are teams: the ranks of their devices, and placements of parameters.
    `whole`: the graph before it was divided, which says what one worker takes.
    """
    count = sharding.devices
    rate, stages = sharding.flops_per_second, []
    for stage in plan.stages:
        names = {name for node in stage.nodes for name in profile.node[node].parameters}
        parameters = {
            name: show_placements(placements)
            for name, placements in sharding.parameters.items()
            if name in names
        }
        ranks = tuple(count * team + device for team in stage.ranks for device in range(count))
        texts = PlacementTexts(parameters=parameters, flops_per_second=rate)
        changed = {"ranks": ranks, "mesh": sharding.mesh, "placements": texts}
        stages.append(stage.model_copy(update=changed))
    seconds = sum(node.compute_seconds for node in whole.nodes.values()) / sharding.speed
    predicted = plan.predicted.model_copy(update={"one_worker_seconds": seconds})
    fields = {"cluster": sharding.cluster, "stages": tuple(stages), "predicted": predicted}
    return Plan.model_validate(plan.model_copy(update=fields).model_dump())

"""The model as one device of a team sees it: its times, parameters and memory.

The planner divides it among teams as it divides a model among devices. What passes between stages
is whole on every device of a team. The devices are then written into its plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipedream.graph.model import Graph, Node
from pipedream.graph.placements.placement import Placements, show_placements
from pipedream.graph.placements.regions import held_region
from pipedream.graph.placements.requests import PlacementTexts
from pipedream.graph.plan import Plan, Stage
from pipedream.graph.profile import Footprint, Profile
from pipedream.optimizer.sharding.model_sharding import ModelSharding
from pipedream.sharding.assignment import redistributions
from pipedream.sharding.planned import strategy_texts
from pipedream.sharding.rules.products import draws_with_data


class DividedStage(NamedTuple):
    """A stage with what divides it, None for workers of one device; `taken`: as `Boundaries.taken`
    has it.
    """

    sharding: ModelSharding | None
    taken: Mapping[str, Placements]


def team_graph(graph: Graph, profile: Profile, sharding: ModelSharding) -> Graph:
    """Each node's passes take the part of its operators' time that a device works, and the
    redistributions of what it computes; sums of gradients over the mesh once for all minibatches of
    an update.
    """
    work, moved = work_shares(sharding), _moved_seconds(sharding)
    nodes = {
        name: replace(
            node,
            forward_seconds=node.forward_seconds * work.get((name, False), 1.0)
            + moved[name, False],
            backward_seconds=node.backward_seconds * work.get((name, True), 1.0)
            + moved[name, True],
            parameter_bytes=node.parameter_bytes * _parameter_share(node, profile, sharding),
        )
        for name, node in graph.nodes.items()
    }
    return replace(graph, nodes=nodes)


def team_footprints(
    footprints: Mapping[str, Footprint], sharding: ModelSharding
) -> dict[str, Footprint]:
    """What each node saves for the backward pass, and what that allocates, on one device."""
    shares, allocated = _saved_shares(sharding), _allocated_shares(sharding)
    drawn, found = _drawn_bytes(sharding), dict[str, Footprint]()
    for name, each in footprints.items():
        share = shares.get(name, 1.0)
        saved, workspace = each.in_programs.saved * share, each.workspace * allocated.get(name, 1.0)
        own = {"saved": saved, "drawn": min(saved, drawn[name]), "workspace": workspace}
        found[name] = replace(each.in_programs, **own, share=share)
    return found


def expand(plan: Plan, stages: Sequence[DividedStage], profile: Profile) -> Plan:
    """Of a plan whose ranks lead the devices of a mesh: the ranks of all devices, and placements of
    all that is divided.
    """
    found = [_expanded(stage, own, profile) for stage, own in zip(plan.stages, stages, strict=True)]
    fields = {"stages": tuple(found)}
    return Plan.model_validate(plan.model_copy(update=fields).model_dump())


def of_leaders(plan: Plan, sharding: ModelSharding) -> Plan:
    """A plan whose ranks are teams, on the cluster of their devices: a team is its first device."""
    count = sharding.devices
    stages = tuple(
        stage.model_copy(update={"ranks": tuple(count * team for team in stage.ranks)})
        for stage in plan.stages
    )
    return plan.model_copy(update={"cluster": sharding.cluster, "stages": stages})


def _expanded(stage: Stage, divided: DividedStage, profile: Profile) -> Stage:
    sharding = divided.sharding
    if sharding is None:
        return stage
    names = {name for node in stage.nodes for name in profile.node[node].parameters}
    parameters = {
        name: show_placements(placements)
        for name, placements in sharding.parameters.items()
        if name in names
    }
    texts = PlacementTexts(
        parameters=parameters,
        flops_per_second=sharding.flops_per_second,
        operators=strategy_texts(sharding.assignment, sharding.profile.nodes, set(stage.nodes)),
        received={node: show_placements(each) for node, each in divided.taken.items()},
    )
    ranks = tuple(leader + device for leader in stage.ranks for device in range(sharding.devices))
    return stage.model_copy(update={"ranks": ranks, "mesh": sharding.mesh, "placements": texts})


def work_shares(sharding: ModelSharding) -> dict[tuple[str, bool], float]:
    """By node and whether backward: seconds of one device in parts of those of the whole."""
    whole, own = Counter[tuple[str, bool]](), Counter[tuple[str, bool]]()
    for call in sharding.assignment.graph.calls:
        key = sharding.profile.nodes[call.name], call.name in sharding.backward
        seconds = sharding.profile.seconds.get(call.name, 0.0)
        whole[key] += seconds  # type: ignore[assignment]
        own[key] += seconds * sharding.work_share(call)  # type: ignore[assignment]
    return {key: own[key] / seconds for key, seconds in whole.items() if seconds}


def _moved_seconds(sharding: ModelSharding) -> Counter[tuple[str, bool]]:
    """Of redistributions, at the node that computes the value, or first reads it: as seconds of
    the device that was profiled, so that they take on any device what the links take.
    """
    found: Counter[tuple[str, bool]] = Counter()
    for each in redistributions(sharding.assignment):
        name = sharding.call_of.get(each.value)
        if name is not None:
            key = sharding.profile.nodes[name], name in sharding.backward
            often = sharding.minibatches if each.often == "update" else 1.0
            found[key] += each.seconds * sharding.speed / often  # type: ignore[assignment]
    return found


def _parameter_share(node: Node, profile: Profile, sharding: ModelSharding) -> float:
    names = [name for name in profile.node[node.id].parameters if name in sharding.shapes]
    whole = sum(math.prod(sharding.shapes[name]) for name in names)
    held = sum(
        held_region(sharding.shapes[name], sharding.mesh, sharding.parameters[name], 0).size
        for name in names
    )
    return held / whole if whole else 1.0


def _saved_shares(sharding: ModelSharding) -> dict[str, float]:
    """By node: what a device saves of the values that it computes and a backward pass reads, in
    parts of the whole values. A value is saved in each placement in which backward operators read
    it, if forward ones have brought it there, else as it was computed.
    """
    assignment, types = sharding.assignment, sharding.assignment.graph.types()
    makers = _makers(sharding)
    present = {(value, assignment.placed[value]) for value in makers}
    present |= {form for name, form in _forms(sharding) if name not in sharding.backward}
    saved = {
        (value, target if (value, target) in present else assignment.placed[value])
        for name, (value, target) in _forms(sharding)
        if name in sharding.backward and value in makers
    }
    whole, own = Counter[str](), Counter[str]()
    for value in {value for value, _ in saved}:
        whole[makers[value]] += math.prod(types[value].shape) * types[value].element_bytes
    for value, placements in saved:
        size = held_region(types[value].shape, sharding.mesh, placements, 0).size
        own[makers[value]] += size * types[value].element_bytes
    return {node: own[node] / size for node, size in whole.items() if size}


def _drawn_bytes(sharding: ModelSharding) -> Counter[str]:
    """By node: the random numbers that its operators read, and the results of operators that draw
    while they compute, at most: as if each device had them whole.
    """
    graph, nodes = sharding.assignment.graph, sharding.profile.nodes
    drawn = {each.value for each in graph.inputs if each.role == "draw"}
    kept = set[tuple[str, str]]()
    for call in graph.calls:
        if call.name not in sharding.backward:
            results = call.results if draws_with_data(call.operator) else ()
            values = drawn.intersection(call.reads).union(v for v in results if v is not None)
            kept.update((nodes[call.name], value) for value in values)
    types, found = graph.types(), Counter[str]()
    for node, value in kept:
        found[node] += math.prod(types[value].shape) * types[value].element_bytes
    return found


def _allocated_shares(sharding: ModelSharding) -> dict[str, float]:
    """By node: the bytes that a device computes in its backward pass, in parts of all."""
    assignment, types = sharding.assignment, sharding.assignment.graph.types()
    whole, own = Counter[str](), Counter[str]()
    for call in assignment.graph.calls:
        for value in call.results if call.name in sharding.backward else ():
            if value is not None:
                type_, node = types[value], sharding.profile.nodes[call.name]
                held = held_region(type_.shape, sharding.mesh, assignment.placed[value], 0)
                whole[node] += math.prod(type_.shape) * type_.element_bytes
                own[node] += held.size * type_.element_bytes
    return {node: own[node] / size for node, size in whole.items() if size}


def _makers(sharding: ModelSharding) -> dict[str, str]:
    """The node that computes each value of the forward pass."""
    return {
        value: sharding.profile.nodes[call.name]
        for call in sharding.assignment.graph.calls
        if call.name not in sharding.backward
        for value in call.results
        if value is not None
    }


def _forms(sharding: ModelSharding) -> Iterator[tuple[str, tuple[str, Placements]]]:
    """The name of each call with each value that it reads, and how it wants it."""
    for call in sharding.assignment.graph.calls:
        targets = sharding.assignment.targets(call.name)
        yield from ((call.name, form) for form in zip(call.reads, targets, strict=True))

"""What is divided in each stage, and what that moves, as tables for the terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import inf

from rich.table import Table

from pipedream.graph.placements.placement import Mesh, Replicate, show_placements
from pipedream.graph.plan import Plan, Stage
from pipedream.graph.profile import Profile
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.optimizer.report.tables import table_of
from pipedream.optimizer.sharding.model_sharding import ModelSharding
from pipedream.sharding.assignment import Redistribution, redistributions
from pipedream.sharding.steps import Collective

_MOST_ROWS = 8

_LAYER = re.compile(r"(?<![^\s.])\d+(?=[.:])")
"""A number in the path of a module."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def sharding_table(plan: Plan, sharding: ModelSharding) -> Table:
    """One row for each way in which parameters of a stage are placed."""
    rows = [
        {"stage": str(stage.stage), "placed": placed, "parameters": ", ".join(names)}
        for stage in plan.stages
        if stage.mesh == sharding.mesh
        for placed, names in _by_placement(stage).items()
    ]
    mesh = " x ".join(map(str, sharding.mesh))
    caption = (
        "S(d): divided along dimension d; R: whole on each. * stands for the numbers of layers."
    )
    title = f"Parameters on the {mesh} devices of a worker"
    return table_of(title, caption, rows, wrapped=("placed", "parameters"))


def traffic_table(plan: Plan, sharding: ModelSharding) -> Table:
    """What the devices of a worker send to each other, by stage and collective."""
    nodes = sharding.profile.nodes
    stage_of = {v: plan.stage_of[nodes[call]] for v, call in sharding.call_of.items()}
    on_mesh = {stage.stage for stage in plan.stages if stage.mesh == sharding.mesh}
    groups: dict[tuple[int, str, str], list[Redistribution]] = {}
    for each in redistributions(sharding.assignment):
        if each.bytes and stage_of[each.value] in on_mesh:
            key = stage_of[each.value], str(each.often), _words(each)
            groups.setdefault(key, []).append(each)
    rows = [
        {
            "stage": str(stage),
            "per": often,
            "collective": collective,
            "number": str(len(own)),
            "bytes": show_bytes(sum(each.bytes for each in own)),
            "time": show_seconds(sum(each.seconds for each in own)),
        }
        for (stage, often, collective), own in sorted(groups.items())
    ]
    caption = "Bytes that a device sends, and the time that takes on the links of the cluster."
    title = "Communication between the devices of a worker"
    return table_of(title, caption, rows, wrapped=("per", "collective"))


def heaviest_table(plan: Plan, sharding: ModelSharding, profile: Profile) -> Table:
    """The redistributions that take most time, those of equal layers together."""
    groups: dict[tuple[int, str, str, str], list[Redistribution]] = {}
    for each in redistributions(sharding.assignment):
        name = sharding.call_of[each.value]
        if each.bytes and plan.stages[plan.stage_of[sharding.profile.nodes[name]]].mesh == (
            sharding.mesh
        ):
            stage = plan.stage_of[sharding.profile.nodes[sharding.call_of[each.value]]]
            way = f"{show_placements(each.source)} -> {show_placements(each.target)}"
            name = _LAYER.sub("*", _name(each.value, sharding, profile))
            groups.setdefault((stage, name, way, each.often), []).append(each)
    seconds = {key: sum(each.seconds for each in own) for key, own in groups.items()}
    heaviest = sorted(groups, key=lambda key: -seconds[key])
    rows = [
        {
            "stage": str(stage),
            "value": name,
            "from -> to": way,
            "per": often,
            "number": str(len(groups[stage, name, way, often])),
            "bytes": show_bytes(sum(each.bytes for each in groups[stage, name, way, often])),
            "time": show_seconds(seconds[stage, name, way, often]),
        }
        for stage, name, way, often in heaviest[:_MOST_ROWS]
    ]
    caption = "P: terms of a sum."
    if rest := heaviest[_MOST_ROWS:]:
        caption += f" {len(rest)} more take {show_seconds(sum(map(seconds.__getitem__, rest)))}."
    title = "The messages that take longest"
    return table_of(title, caption, rows, wrapped=("value", "from -> to"))


def _name(value: str, sharding: ModelSharding, profile: Profile) -> str:
    """What the model has by that name, else the layer and the operator that compute it."""
    graph = sharding.assignment.graph
    for given in graph.inputs:
        if given.value == value:
            return (
                given.name
                if given.role in ("parameter", "buffer")
                else (f"{given.role} {given.name}")
            )
    for output in graph.outputs:
        if output.value == value and output.role == "parameter gradient":
            return f"gradient of {output.name}"
    call = sharding.call_of[value]
    node = sharding.profile.nodes[call]
    operator = sharding.operators[call].target.removeprefix("aten.").partition(".")[0]
    backward = ", backward" if call in sharding.backward else ""
    return f"{profile.modules.get(node) or node}: {operator}{backward}"


def beside(
    tried: Mapping[Mesh, float],
    alone: float,
    shardings: Sequence[ModelSharding],
    seconds: float | None,
) -> str:
    """What plans with and without meshes take, in words; `shardings`: of the plan that was chosen,
    which takes so many `seconds` if it is none of one mesh for all; `alone`: seconds with workers
    of one device, infinite if there is no such plan.
    """
    shown = {" x ".join(map(str, mesh)): show_seconds(seconds) for mesh, seconds in tried.items()}
    others = ", ".join(f"{mesh}: {seconds}" for mesh, seconds in shown.items())
    if not shardings:
        return f"Workers that are meshes of devices would not be faster ({others})."
    what = "no plan fits" if alone == inf else show_seconds(alone)
    text = f"Workers of one device: {what}; of meshes of devices, the same in all stages: {others}"
    if seconds is not None:
        text += f"; the best of each stage: {show_seconds(seconds)}"
    return " ".join((f"{text}.", *dict.fromkeys(map(proof, shardings))))


def proof(sharding: ModelSharding) -> str:
    """How good the division of the operators is, in words."""
    found = sharding.found
    if found is None:
        return ""
    mesh = " x ".join(map(str, sharding.mesh))
    what = f"the operators of its stages on {mesh} devices"
    if not found.of_stages:
        what = f"the whole model's operators on {mesh} devices"
    if found.gap > 0.0:
        return f"Another division of {what} may be faster, by {100 * found.gap:.1f} % at most."
    text = f"No other division of {what} is faster."
    if found.tied is not None and found.seconds > 0:
        more = max(0.0, 100 * (found.tied / found.seconds - 1))
        text += f" The best that is the same for all equal layers costs {more:.2f} % more."
    return text


def notes(sharding: ModelSharding, profile: Profile) -> dict[str, str]:
    """By node: `weight S(0), bias S(0); gives S(1)`, of the parameters that are divided, and of
    what other nodes read of it, as it computes that.
    """
    found, given = {}, _given(sharding)
    for node in profile.nodes:
        texts = [
            f"{name.rpartition('.')[2]} {show_placements(sharding.parameters[name])}"
            for name in node.parameters
            if any(each != Replicate() for each in sharding.parameters.get(name, ()))
        ]
        gives = f"gives {', '.join(given[node.id])}" if node.id in given else ""
        if texts or gives:
            found[node.id] = "; ".join(filter(None, (", ".join(texts), gives)))
    return found


def _given(sharding: ModelSharding) -> dict[str, list[str]]:
    """By node the placements, each once, of the values that the node computes and others read in
    the forward pass, if any is not whole.
    """
    nodes, placed = sharding.profile.nodes, sharding.assignment.placed
    forward = [c for c in sharding.assignment.graph.calls if c.name not in sharding.backward]
    maker = {v: nodes[call.name] for call in forward for v in call.results if v is not None}
    read = (v for call in forward for v in call.reads if maker.get(v, "") != nodes[call.name])
    found: dict[str, dict[str, None]] = {}
    for value in dict.fromkeys(v for v in read if v in maker):
        found.setdefault(maker[value], {})[show_placements(placed[value])] = None
    whole = show_placements((Replicate(),) * len(sharding.mesh))
    return {node: list(texts) for node, texts in found.items() if list(texts) != [whole]}


def _by_placement(stage: Stage) -> dict[str, list[str]]:
    """The names by placement, as patterns where layers are alike; those that are whole last."""
    texts = stage.placements.parameters if stage.placements is not None else {}
    placed: dict[str, set[str]] = {}
    for name, text in texts.items():
        for pattern in _patterns(name):
            placed.setdefault(pattern, set()).add(text)
    found: dict[str, dict[str, None]] = {}
    for name, text in sorted(texts.items(), key=lambda each: "S" not in each[1]):
        pattern = next(p for p in _patterns(name) if len(placed[p]) == 1)
        found.setdefault(text, {})[pattern] = None
    return {text: list(names) for text, names in found.items()}


def _patterns(name: str) -> tuple[str, str, str]:
    """With * for all its numbers, for the first alone, and the name itself."""
    return _NUMBER.sub("*", name), _NUMBER.sub("*", name, count=1), name


def _words(redistribution: Redistribution) -> str:
    moving = (s for s in redistribution.steps if s.collective is not Collective.SLICE)
    return ", ".join(dict.fromkeys(step.collective.value for step in moving))

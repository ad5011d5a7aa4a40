"""Exports a plan for other frameworks: a JSON file each, in the framework's own terms.

| framework | file | holds |
|---|---|---|
| torch | export-torch.json | the operators of each stage |
| | export-torch.csv | the order of passes, where torch can run it (`torch_order`) |
| torchtitan | export-torchtitan.json | fields of its ParallelismConfig |
| DeepSpeed | export-deepspeed.json | the modules in order, and `parts`: where each stage begins |
| Megatron | export-megatron.json | its options, among them the pipeline layout |

Of a plan whose stages are on meshes, torch and torchtitan get export-NAME-placements.json, too:
`dtensor`. The others get degrees of parallelism alone, and divide parameters as they do.

runtime/pipelining.py makes a `split_policy` for torch.distributed.pipelining.pipeline of torch's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan
from pipedream.graph.profile import Profile
from pipedream.optimizer.export.degrees import degrees
from pipedream.optimizer.export.dtensor import dtensor_file, notes
from pipedream.optimizer.export.module_split import Layering, split_modules, uneven
from pipedream.optimizer.export.torch_order import torch_order


@dataclass(frozen=True)
class Export:
    """The content of the file, notes for the user, a line each, and a CSV and `placements` of
    parameters, if there are any.
    """

    content: Mapping[str, Any]
    notes: tuple[str, ...]
    csv: str | None = None
    placements: Mapping[str, Any] | None = None

    def files(self, name: str) -> dict[str, bytes | None]:
        """The content of each file by its name, None if there is none."""
        return {
            f"{name}.json": _text(self.content),
            f"{name}.csv": None if self.csv is None else self.csv.encode(),
            f"{name}-placements.json": None if self.placements is None else _text(self.placements),
        }


def _text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def export(
    framework: str,
    plan: Plan,
    graph: Graph,
    profile: Profile,
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Export:
    """The plan for one of `FRAMEWORKS`; `profile` belongs to `graph`, and `shapes` are those of its
    parameters, as far as they are known.

    Raises UserError if the framework cannot express the plan.
    """
    try:
        exported = FRAMEWORKS[framework](plan, graph, profile)
    except UserError as error:
        raise UserError(f"--export {framework}: {error.format_message()}") from error
    placing = () if exported.placements is None else notes(plan, shapes)
    further = *placing, *_dividing(plan, framework)
    return replace(exported, notes=(*exported.notes, *further))


_ZERO = {
    "deepspeed": ": set zero_optimization: {stage: 1} in its config",
    "megatron": ": add --use-distributed-optimizer",
}


def _dividing(plan: Plan, framework: str) -> Iterator[str]:
    divided = ", ".join(str(stage.stage) for stage in plan.stages if stage.zero)
    if divided:
        yield (
            f"replicas divide the optimizer's state in stage {divided} (ZeRO-1), which the file"
            f" does not say{_ZERO.get(framework, '')}"
        )


def _torch(plan: Plan, graph: Graph, profile: Profile) -> Export:
    """Can express every split: operators are put in the order of the stages. Not every order."""
    calls = profile.node
    working = [[n for n in stage.nodes if not graph.nodes[n].is_input] for stage in plan.stages]
    content: dict[str, Any] = {
        "format": "pipedream-torch-split/1",
        "model": profile.model,
        "torch": profile.machine.torch,
        "stages": [
            [tensor.name for n in nodes for tensor in calls[n].outputs] for nodes in working
        ],
    }
    notes, placements = tuple(uneven(plan)), None
    if any(stage.mesh is not None for stage in plan.stages):
        placements = dtensor_file(plan)
    try:
        order = torch_order(plan)
    except UserError as error:
        reason = f"without an order of passes: {error.format_message()}"
        return Export(content, (*notes, reason), placements=placements)
    named = {"microbatches": order.microbatches, "stage_ranks": order.stage_ranks}
    content["order"] = {"file": "export-torch.csv", **named}
    return Export(content, notes, order.csv, placements)


def _torchtitan(plan: Plan, graph: Graph, profile: Profile) -> Export:
    split = split_modules(plan, graph, profile.node)
    deep = [name for stage in split.stages for name in stage if name.count(".") > 1]
    notes = [
        f"its splitter knows children of the model and entries of their lists, not {name}"
        for name in deep[:1]
    ]
    content: dict[str, Any] = {
        "module_fqns_per_model_part": split.stages,
        "pipeline_parallel_degree": len(split.stages),
    }
    meshes = degrees(plan, len(split.stages))
    if meshes is None:
        return Export(content, (*split.notes, *notes))
    content["tensor_parallel_degree"] = meshes.tensor
    if meshes.data is not None:
        content["data_parallel_replicate_degree"] = meshes.data
    note = "its models place parameters themselves: the file of placements has those of the plan"
    placements = dtensor_file(plan, split.stages)
    return Export(content, (*split.notes, *notes, note), placements=placements)


def _deepspeed(plan: Plan, graph: Graph, profile: Profile) -> Export:
    split = split_modules(plan, graph, profile.node)
    content: dict[str, Any] = {
        "layers": [name for stage in split.stages for name in stage],
        "parts": [0, *accumulate(len(stage) for stage in split.stages)],
    }
    meshes = degrees(plan, len(split.stages))
    if meshes is None:
        return Export(content, split.notes)
    content["topology"] = {"num_pp": meshes.pipeline, "num_mp": meshes.tensor}
    if meshes.data is not None:
        content["topology"]["num_dp"] = meshes.data
    note = (
        "it divides no layers: give it ones that divide themselves among num_mp devices; --export"
        " torch has the plan's placements"
    )
    return Export(content, (*split.notes, *[note] * (meshes.tensor > 1)))


def _megatron(plan: Plan, graph: Graph, profile: Profile) -> Export:
    """`E` for all before the transformer layers, `t` for each layer, `L` for all after them."""
    split = split_modules(plan, graph, profile.node, _letters)
    layout = "|".join("".join(name[0] for name in stage) for stage in split.stages)
    for letter, what in (("E", "before"), ("L", "after")):
        if letter not in layout:
            raise UserError(
                f"there is no module {what} the list of layers; it takes one for {letter}"
            )
    content: dict[str, Any] = {
        "pipeline_model_parallel_layout": layout,
        "pipeline_model_parallel_size": len(split.stages),
        "num_layers": layout.count("t"),
    }
    meshes = degrees(plan, len(split.stages))
    if meshes is None:
        return Export(content, split.notes)
    content["tensor_model_parallel_size"] = meshes.tensor
    notes = []
    if meshes.processes is not None:
        notes.append(
            f"start {meshes.processes} processes: data parallelism is what is left of them"
        )
    if meshes.tensor > 1:
        notes.append(
            "its layers are divided as their code says, not as the plan does; --export torch has"
            " the plan's placements"
        )
    return Export(content, (*split.notes, *notes))


def _letters(layering: Layering) -> Mapping[str, str]:
    """Returns a name for each module: E, L, or t and its own name."""
    if len(layering.lists) != 1:
        names = ", ".join(layering.lists) or "none"
        raise UserError(f"it lays out one list of transformer layers; this model's lists: {names}")
    inside = f"{layering.lists[0]}." if layering.lists[0] else ""
    units, numbered = layering.units, re.compile(re.escape(inside) + r"\d+")
    layers = [place for place, unit in enumerate(units) if numbered.fullmatch(unit)]
    first, last = layers[0], layers[-1]
    if len(layers) != last - first + 1:
        raise UserError("other modules stand between the layers of the list")
    return {
        unit: "E" if place < first else "L" if place > last else f"t {unit}"
        for place, unit in enumerate(units)
    }


FRAMEWORKS: Mapping[str, Callable[[Plan, Graph, Profile], Export]] = {
    "torch": _torch,
    "torchtitan": _torchtitan,
    "deepspeed": _deepspeed,
    "megatron": _megatron,
}

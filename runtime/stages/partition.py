"""What each stage of a plan computes, and which tensors pass between stages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipedream.capture.captured import Captured, Value
from pipedream.capture.segment import Segment, segment
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan, PlannedGraph

_FREED = re.compile(r";  (\w+ = )+None$")
"""How generated code drops what it no longer needs; of no interest to a reader."""

_SOURCE = '''"""{head}
"""

import torch
from torch import device


class Stage{stage}(torch.nn.Module):
    """Parameters:

{holds}    """
{body}'''


@dataclass(frozen=True)
class StageInterface:
    """Where the tensors of one stage come from and go to.

    `receives[s]`: the values that stage s sends here; `sends[t]`: those that stage t reads; both in
    the order of the message. `reads`: the inputs of the model that this stage reads, as positions
    in `Captured.inputs`. Outputs of the model that an earlier stage makes go to the last stage,
    which has the loss.
    """

    stage: int
    nodes: tuple[str, ...]
    reads: Mapping[str, int]
    receives: Mapping[int, tuple[Value, ...]]
    sends: Mapping[int, tuple[Value, ...]]

    def build(self, captured: Captured) -> Segment:
        """Returns the module of the stage; it gives what is sent, and outputs of the model."""
        return segment(captured, frozenset(self.nodes), captured.outputs)

    @cached_property
    def sent(self) -> tuple[str, ...]:
        """The values that other stages read."""
        values = (value for values in self.sends.values() for value in values)
        return tuple(dict.fromkeys(value.name for value in values))

    @cached_property
    def received_for_gradient(self) -> tuple[str, ...]:
        """The values of other stages that want a gradient."""
        received = (value for values in self.receives.values() for value in values)
        return tuple(value.name for value in received if value.requires_grad)


def interfaces(captured: Captured, plan: Plan) -> tuple[StageInterface, ...]:
    """Returns the interface of every stage.

    Raises UserError if the captured model is not the one that was planned.
    """
    stage_of = _stages(captured, plan)
    readers = _readers(captured, stage_of, last=len(plan.stages) - 1)
    maker = {name: stage_of[value.node] for name, value in captured.values.items()}
    inputs = {name: position for position, name in enumerate(captured.inputs)}

    def between(source: int, target: int) -> tuple[Value, ...]:
        return tuple(
            captured.values[name]
            for name, stages in readers.items()
            if name not in inputs and maker[name] == source and target in stages
        )

    stages = range(len(plan.stages))
    return tuple(
        StageInterface(
            stage=stage,
            nodes=tuple(node for node in captured.graph.order if stage_of[node] == stage),
            reads={name: at for name, at in inputs.items() if stage in readers[name]},
            receives=_present({source: between(source, stage) for source in range(stage)}),
            sends=_present({target: between(stage, target) for target in stages[stage + 1 :]}),
        )
        for stage in stages
    )


def links(interfaces: Sequence[StageInterface]) -> tuple[tuple[int, int], ...]:
    """Returns the pairs of stages that exchange tensors."""
    return tuple(
        (interface.stage, target) for interface in interfaces for target in interface.sends
    )


def tied(captured: Captured, interfaces: Sequence[StageInterface]) -> dict[str, tuple[int, ...]]:
    """Returns the parameters that several stages hold and learn, by their first name, with those
    stages.
    """
    first: dict[int, str] = {}
    holders: dict[str, dict[int, None]] = {}
    for interface in interfaces:
        for node in interface.nodes:
            for name in captured.parameters[node]:
                parameter = captured.module.get_parameter(name)
                if not parameter.requires_grad:
                    continue
                known = first.setdefault(id(parameter), name)
                holders.setdefault(known, {})[interface.stage] = None
    return {name: tuple(stages) for name, stages in holders.items() if len(stages) > 1}


def holds_first(name: str, stage: int, tied: Mapping[str, Sequence[int]]) -> bool:
    """Returns whether `stage` is the first of the stages that hold the parameter, as `tied` has
    them: there it counts in a norm of the whole model.
    """
    return min(tied.get(name, (stage,))) == stage


def _present(messages: Mapping[int, tuple[Value, ...]]) -> dict[int, tuple[Value, ...]]:
    return {stage: values for stage, values in messages.items() if values}


def _stages(captured: Captured, plan: Plan) -> dict[str, int]:
    """Returns the stage of each captured node: the plan's, matched by topological position."""
    difference = first_difference(plan.graph, captured.graph)
    if difference is not None:
        raise UserError(
            f"this plan was made for another model: {difference}; run pd-profile and pd-optimize "
            "on this one"
        )
    pairs = zip(captured.graph.order, plan.graph.nodes, strict=True)
    return {name: plan.stage_of[planned.id] for name, planned in pairs}


def first_difference(planned: PlannedGraph, graph: Graph) -> str | None:
    """Describes the first node in which the model differs from the planned one, if any."""
    if planned.fingerprint == graph.fingerprint:
        return None
    known = {node.id: position for position, node in enumerate(planned.nodes)}
    position = {name: at for at, name in enumerate(graph.order)}
    for name, node in zip(graph.order, planned.nodes, strict=False):
        if graph.nodes[name].description != node.description:
            description = graph.nodes[name].description
            return f"{node.id} is {node.description!r} in the plan and {description!r} in the model"
        inputs = sorted(position[source] for source in graph.predecessors[name])
        if inputs != sorted(known[source] for source in node.inputs):
            return f"{node.id} ({node.description}) has other inputs in the model"
    if len(planned.nodes) > len(graph.nodes):
        node = planned.nodes[len(graph.nodes)]
        return f"{node.id} is {node.description!r} in the plan and the model has no more nodes"
    if len(planned.nodes) < len(graph.nodes):
        description = graph.nodes[graph.order[len(planned.nodes)]].description
        return f"the plan has no more nodes where the model goes on with {description!r}"
    return "its fingerprint is not that of its nodes"


def _readers(captured: Captured, stage_of: Mapping[str, int], last: int) -> dict[str, set[int]]:
    """Returns the stages that read each value; the last stage reads the model's outputs."""
    readers: dict[str, set[int]] = {name: set() for name in captured.values}
    for node in captured.module.graph.nodes:
        owner = captured.owner.get(node.name)
        if owner is None or node.op != "call_function":
            continue
        for source in node.all_input_nodes:
            if source.name in readers:
                readers[source.name].add(stage_of[owner])
    for name in captured.outputs:
        readers[name].add(last)
    return readers


def source_text(captured: Captured, plan: Plan, interface: StageInterface, piece: Segment) -> str:
    """Returns the stage as Python for people to read: `stage0.py`. Nothing reads it back."""
    stage = plan.stages[interface.stage]
    ranks = "rank" if len(stage.ranks) == 1 else "ranks"
    head = [
        f"Stage {interface.stage} of {len(plan.stages)}, on {ranks}"
        f" {', '.join(map(str, stage.ranks))}.",
        "",
    ]
    head += [f"reads input {at} of the model as {name}" for name, at in interface.reads.items()]
    for source, values in interface.receives.items():
        head += [f"receives {_describe(value)} from stage {source}" for value in values]
    for target, values in interface.sends.items():
        head += [f"sends {_describe(value)} to stage {target}" for value in values]
    holds = [
        f"        self.{name}: {tuple(parameter.shape)}, {_short(parameter.dtype)}\n"
        for name, parameter in piece.module.named_parameters()
    ]
    body = "\n".join(_body(captured, piece))
    return _SOURCE.format(
        head="\n".join(head), stage=interface.stage, holds="".join(holds), body=body
    )


def _body(captured: Captured, piece: Segment) -> list[str]:
    """Returns the generated forward, each graph node under a comment that names it."""
    lines: list[str] = []
    last = ""
    for line in piece.module.code.strip("\n").splitlines():
        match = re.match(r"\s+(\w+) = ", line)
        owner = captured.owner.get(match[1], "") if match else ""
        if owner and owner != last:
            lines.append(f"        # {owner}: {captured.graph.nodes[owner].description}")
            last = owner
        lines.append(f"    {_FREED.sub('', line)}".rstrip())
    return [*lines, ""]


def _describe(value: Value) -> str:
    return f"{value.name} {tuple(value.shape)} {_short(value.dtype)}"


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")

"""Part of a captured model as a module: a node for the profiler, a stage for a run."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pipedream.capture.captured import Captured
from pipedream.capture.compute_settings import placed
from pipedream.capture.rewrites.writes import changes_something, targets


@dataclass(frozen=True)
class Segment:
    """Part of a model: `module(*inputs) -> tuple of outputs`, with its own parameters and buffers.

    `inputs` and `outputs` are names of values (`captured.values[name]`). Parameters and buffers
    have the same names as in the model.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def state(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers that the module reads, by name."""
        names = [str(node.target) for node in self.module.graph.find_nodes(op="get_attr")]
        values = {name: operator.attrgetter(name)(self.module) for name in names}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @property
    def written_buffers(self) -> tuple[str, ...]:
        """Returns the buffers that a forward pass changes, such as the statistics of batch norm."""
        changed = (node for each in self.module.graph.nodes for node in targets(each))
        return tuple(dict.fromkeys(str(node.target) for node in changed if node.op == "get_attr"))

    def to(self, device: torch.device) -> Segment:
        """Moves parameters, buffers and `device` arguments of operators to `device`, in place."""
        self.module.to(device)
        for part in self.module.modules():
            if isinstance(part, fx.GraphModule):
                for node in part.graph.nodes:
                    node.args, node.kwargs = placed((node.args, node.kwargs), device)
                part.recompile()
        return self


def segment(captured: Captured, nodes: Collection[str], keep: Collection[str] = ()) -> Segment:
    """Returns the part of `captured` that consists of the graph nodes `nodes`.

    Its inputs are the values that it reads from other nodes, and inputs of the model. Its outputs
    are the values that other nodes read, and those in `keep`.
    """
    members = _members(captured, nodes)
    inside = [node for node in captured.module.graph.nodes if node in members]
    read = {source: None for node in inside for source in node.all_input_nodes}
    inputs = [source for source in read if source.op != "get_attr" and source not in members]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in inputs:
        copies[source] = graph.create_node("placeholder", source.name, name=source.name)
        copies[source].meta = dict(source.meta)
    for source in read:
        if source.op == "get_attr":
            copies[source] = graph.node_copy(source)
    for node in inside:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    outside = {user for node in inside for user in node.users if user.op != "output"} - members
    outputs = [
        node
        for node in inside
        if node.name in captured.owner and (node.name in keep or outside.intersection(node.users))
    ]
    graph.output(tuple(copies[node] for node in outputs))
    module = fx.GraphModule(captured.module, graph)
    return Segment(
        module, tuple(node.name for node in inputs), tuple(node.name for node in outputs)
    )


def _members(captured: Captured, nodes: Collection[str]) -> set[fx.Node]:
    """Returns the operators of these graph nodes and the constants that they read."""
    operators = [node for node in captured.module.graph.nodes if node.op == "call_function"]
    members = {node for node in operators if captured.owner.get(node.name) in nodes}
    for node in reversed(operators):
        if node.name not in captured.owner and not members.isdisjoint(node.users):
            members.add(node)
    return members


def freeze_constants(part: Segment, owned: Collection[str]) -> Segment:
    """Computes the constants of a segment once and stores them as buffers, in place; returns it.

    Constants are the operators whose names are not in `owned` (`Captured.owner`). Call this after
    the segment was moved to its device.
    """
    graph = part.module.graph
    fixed = [node for node in graph.nodes if node.op == "call_function" and node.name not in owned]
    values: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        if node not in values:
            assert node.op == "get_attr", f"{node} is not a constant"
            values[node] = operator.attrgetter(str(node.target))(part.module)
        return values[node]

    with torch.no_grad():
        for node in fixed:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
            assert callable(node.target)
            values[node] = node.target(*args, **kwargs)
    for node in fixed:
        if isinstance(values[node], Tensor):
            name = f"constant_{node.name}"
            part.module.register_buffer(name, values[node], persistent=False)
            with graph.inserting_before(node):
                constant = graph.get_attr(name)
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)
    graph.eliminate_dead_code(changes_something)
    part.module.recompile()
    return part

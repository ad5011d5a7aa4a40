"""Groups operators into graph nodes: calls of innermost modules, or single functional operators."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import networkx as nx
from torch import fx, nn

from pipedream.capture.captured import Captured
from pipedream.capture.errors.capture_errors import place_of
from pipedream.capture.rewrites.functionalize import writes_shared_memory
from pipedream.capture.rewrites.writes import targets

IN_PLACE = "InPlace"
"""The description of a node of several groups that read and write the same memory."""
_LARGE = 0.25
"""A node with more than this part of the operators is worth a word."""


@dataclass
class OperatorGroup:
    """The operators of one graph node in order; `path` is the module whose code calls them."""

    description: str
    path: str
    nodes: list[fx.Node] = field(default_factory=list)


def group_by_module(
    operators: Sequence[fx.Node], module: fx.GraphModule, model: nn.Module
) -> list[OperatorGroup]:
    """Groups these operators of an exported graph, in order of execution.

    A module call is innermost if it calls no module that runs operators. Its operators are
    consecutive, so the groups are intervals of a topological order and form no cycle.
    """
    outer = {key for node in operators for key in _calls(node)[:-1]}
    groups: list[OperatorGroup] = []
    of: dict[fx.Node, OperatorGroup] = {}
    last_key = ""
    for node in operators:
        key = (_calls(node) or [""])[-1]
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            group = of[node.args[0]]
        elif groups and key == last_key and key not in outer and key:
            group = groups[-1]
        else:
            group = OperatorGroup(*_describe(node, model, key in outer or not key))
            groups.append(group)
            last_key = key
        group.nodes.append(node)
        of[node] = group
    return _in_order(_join_shared_memory(groups, module), module)


def _calls(node: fx.Node) -> list[str]:
    """Keys of the module calls around an operator, outermost first; each call has its own key."""
    return list(node.meta.get("nn_module_stack") or {})


def _describe(node: fx.Node, model: nn.Module, functional: bool) -> tuple[str, str]:
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    if functional:
        return operator_name(node), path
    return repr(model.get_submodule(path)).replace("\n", ""), path


def operator_name(node: fx.Node) -> str:
    """Writes `aten.scaled_dot_product_attention.default` as `ScaledDotProductAttention`."""
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    return "".join(part[:1].upper() + part[1:] for part in name.split("_")) or name


def _join_shared_memory(groups: list[OperatorGroup], module: fx.GraphModule) -> list[OperatorGroup]:
    """Joins groups that read and write the same memory, and everything between them."""
    of = {node: index for index, group in enumerate(groups) for node in group.nodes}
    for together in writes_shared_memory(module):
        parts = nx.DiGraph(
            (of[source], of[node])
            for node in of
            for source in node.all_input_nodes
            if source in of and of[source] != of[node]
        )
        ends = {of[node] for node in together if node in of}
        parts.add_nodes_from(ends)
        below = set().union(*(nx.descendants(parts, end) for end in ends))
        above = set().union(*(nx.ancestors(parts, end) for end in ends))
        joined = sorted(ends | (below & above))
        first = groups[joined[0]]
        for index in joined[1:]:
            first.nodes += groups[index].nodes
            groups[index].nodes = []
        first.description = first.description if len(joined) == 1 else IN_PLACE
        of = {node: index for index, group in enumerate(groups) for node in group.nodes}
    return [group for group in groups if group.nodes]


def _in_order(groups: list[OperatorGroup], module: fx.GraphModule) -> list[OperatorGroup]:
    """Returns the groups in a topological order, close to the order of execution."""
    position = {node: index for index, node in enumerate(module.graph.nodes)}
    of = {node: index for index, group in enumerate(groups) for node in group.nodes}
    parts: nx.DiGraph[int] = nx.DiGraph()
    parts.add_nodes_from(range(len(groups)))
    for node, index in of.items():
        sources = (of[source] for source in node.all_input_nodes if source in of)
        parts.add_edges_from((source, index) for source in sources if source != index)
    last = [max(position[node] for node in group.nodes) for group in groups]
    for group in groups:
        group.nodes.sort(key=position.__getitem__)
    order = nx.lexicographical_topological_sort(parts, key=last.__getitem__)
    return [groups[index] for index in order]


def undivided(captured: Captured) -> str:
    """Says where a model cannot be divided, because a write in place holds much of it together: a
    line on the largest node of all that shares memory with a write; empty if it has few operators.
    """
    nodes, owner = captured.module.graph.nodes, captured.owner
    sizes = Counter(owner[n.name] for n in nodes if n.op != "placeholder" and n.name in owner)
    described = captured.graph.nodes
    in_place = [name for name in sizes if described[name].description == IN_PLACE]
    largest = max(in_place, key=sizes.__getitem__, default="")
    if not in_place or sizes[largest] <= _LARGE * sizes.total():
        return ""
    inside = (each for each in nodes if owner.get(each.name) == largest)
    writer = next(each for each in inside if targets(each))
    return (
        f"{place_of(writer)}{largest} has {sizes[largest] / sizes.total():.0%} of the operators, "
        f"and stays on one stage: it is all that uses the memory that {operator_name(writer)} "
        "writes into; make a new tensor instead, with torch.where, torch.cat or clone"
    )

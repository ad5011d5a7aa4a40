"""Groups operators into graph nodes: calls of innermost modules, or single functional operators.

Constants are in no node: values that depend on no input or parameter, such as masks and rotary
tables. Every part of the model that reads one computes it itself, so constants cross no cut and add
no sources that the planner would have to place.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx
from torch import fx, nn

from pipedream.capture.captured import Captured
from pipedream.capture.errors.capture_errors import place_of
from pipedream.capture.rewrites.functionalize import writes_shared_memory
from pipedream.capture.rewrites.writes import is_draw, reachable, targets

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


def constants(module: fx.GraphModule) -> frozenset[fx.Node]:
    """Returns the operators that depend on no input, parameter, random number or changing buffer.

    Those that an output of the model depends on are left out.
    """
    varying = {node for together in writes_shared_memory(module) for node in together}
    states = [state for node in module.graph.nodes for state in targets(node)]
    changing = {state.target for state in states if state.op == "get_attr"}
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    fixed: set[fx.Node] = set()
    for node in module.graph.nodes:
        if (node.op == "get_attr" and node.target not in parameters | changing) or (
            node.op == "call_function"
            and node not in varying
            and not (targets(node) or is_draw(node))
            and fixed.issuperset(node.all_input_nodes)
        ):
            fixed.add(node)
    (output,) = module.graph.find_nodes(op="output")
    for node in fixed.intersection(output.all_input_nodes):
        fixed -= reachable(node, lambda value: value.all_input_nodes)
    return frozenset(node for node in fixed if node.op == "call_function")


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
    return _in_order(_join_lone(_join_shared_memory(groups, module)), module)


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
    of = _numbers(groups)
    for together in writes_shared_memory(module):
        ends = {of[node] for node in together if node in of}
        if len(ends) < 2:
            continue
        parts = _reads(groups, of)
        below = set().union(*(nx.descendants(parts, end) for end in ends))
        above = set().union(*(nx.ancestors(parts, end) for end in ends))
        joined = sorted(ends | (below & above))
        first = groups[joined[0]]
        for index in joined[1:]:
            first.nodes += groups[index].nodes
            groups[index].nodes = []
        first.description = IN_PLACE
        of = _numbers(groups)
    return [group for group in groups if group.nodes]


def _join_lone(groups: list[OperatorGroup]) -> list[OperatorGroup]:
    """Joins what reads nothing that others compute, and gives nothing that they read, with the
    layer after it, the last with that before: timm's norms count minibatches so. Alone it could be
    in any stage, and thirty of them in more ways than a planner can list.
    """
    kept: list[OperatorGroup] = []
    before: list[fx.Node] = []
    for group in groups:
        if _is_lone(group):
            before += group.nodes
        else:
            group.nodes[:0] = before
            before = []
            kept.append(group)
    if not kept:
        return groups
    kept[-1].nodes += before
    return kept


def _is_lone(group: OperatorGroup) -> bool:
    near = {other for node in group.nodes for other in (*node.all_input_nodes, *node.users)}
    return all(other.op == "get_attr" for other in near.difference(group.nodes))


def _in_order(groups: list[OperatorGroup], module: fx.GraphModule) -> list[OperatorGroup]:
    """Returns the groups in a topological order, close to the order of execution."""
    position = {node: index for index, node in enumerate(module.graph.nodes)}
    parts = _reads(groups, _numbers(groups))
    last = [max(position[node] for node in group.nodes) for group in groups]
    for group in groups:
        group.nodes.sort(key=position.__getitem__)
    order = nx.lexicographical_topological_sort(parts, key=last.__getitem__)
    return [groups[index] for index in order]


def _numbers(groups: Sequence[OperatorGroup]) -> dict[fx.Node, int]:
    """Returns the number of each operator's group."""
    return {node: index for index, group in enumerate(groups) for node in group.nodes}


def _reads(groups: Sequence[OperatorGroup], of: Mapping[fx.Node, int]) -> nx.DiGraph[int]:
    """Returns the graph of which group reads which; `of`: see `_numbers`."""
    parts: nx.DiGraph[int] = nx.DiGraph()
    parts.add_nodes_from(range(len(groups)))
    for node, index in of.items():
        sources = (of[source] for source in node.all_input_nodes if source in of)
        parts.add_edges_from((source, index) for source in sources if source != index)
    return parts


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
    inside = (node for node in nodes if owner.get(node.name) == largest)
    writer = next(node for node in inside if targets(node))
    return (
        f"{place_of(writer)}{largest} has {sizes[largest] / sizes.total():.0%} of the operators, "
        f"and stays on one stage: it is all that uses the memory that {operator_name(writer)} "
        "writes into; make a new tensor instead, with torch.where, torch.cat or clone"
    )

"""Groups of nodes that a plan keeps whole (seed 003, after TVM's grouping by dominators).

A group has one *exit*, whose output alone is read outside: it is what post-dominates the others.
So groups can be computed one after the other, and what crosses between them is what crossed before.
No group has more than one complicated operator, its *anchor*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from pipedream.graph.model import Graph
from pipedream.graph.placements.module_groups import module_groups
from pipedream.graph.placements.operator_class import OperatorClass, class_of_layer
from pipedream.graph.placements.operators import OperatorProfile
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.sharding.operator_class import class_of

COMPLICATED = OperatorClass.COMPLICATED


def classes_of(graph: Graph, operators: OperatorProfile | None) -> dict[str, OperatorClass]:
    """Returns that of each node: of the operator of its forward pass that needs most, or by its
    description if those are not known.
    """
    found = {name: class_of_layer(node.description) for name, node in graph.nodes.items()}
    if operators is None:
        return found
    backward = operators.graph.backward_calls()
    forward = [call for call in operators.graph.calls if call.name not in backward]
    known: dict[str, OperatorClass] = {}
    for call in forward:
        node = operators.nodes[call.name]
        known[node] = max(known.get(node, OperatorClass.INDEPENDENT), class_of(call.operator))
    return found | known


@dataclass
class _Group:
    """`members`, the exit first; whether one of them is an anchor."""

    members: list[str] = field(default_factory=list)
    anchored: bool = False


def fusion_groups(
    graph: PlanningGraph, classes: Mapping[str, OperatorClass]
) -> tuple[tuple[str, ...], ...]:
    """Returns the groups of the nodes to divide, each in the order of the graph, in the order of
    their exits.
    """
    readers = {
        name: [graph.names[reader] for reader in own]
        for name, own in zip(graph.names, graph.consumers, strict=True)
    }
    of_node: dict[str, _Group] = {}
    # group(n) = the one group of all readers of n, unless that has an anchor, as n may follow one
    # of its own; else a new one, of which n is the exit
    for name in reversed(graph.names):
        reader = _only_reader(readers[name], of_node)
        if reader is None or reader.anchored:
            reader = _Group()
        _join(reader, [name], classes[name] == COMPLICATED, of_node)
    # what follows no anchor and is read by one group alone goes before the anchor of that
    for name in reversed(graph.names):
        group = of_node[name]
        reader = None if group.members[0] != name else _only_reader(readers[name], of_node)
        if reader is not None and not (reader.anchored and group.anchored):
            _join(reader, group.members, group.anchored, of_node)
    exits = [name for name in graph.names if of_node[name].members[0] == name]
    return tuple(
        tuple(sorted(of_node[exit].members, key=graph.position.__getitem__)) for exit in exits
    )


def whole_modules(graph: PlanningGraph, paths: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Returns the blocks of the model that have one exit; the nodes of others are each by itself.

    `paths`: the module of each node.
    """
    found: list[tuple[str, ...]] = []
    for group in module_groups(graph.names, paths):
        own = set(group)
        exits = [name for name in group if not _read_within(graph, name, own)]
        found += [group] if len(exits) == 1 else [(name,) for name in group]
    return tuple(found)


def _read_within(graph: PlanningGraph, name: str, group: Set[str]) -> bool:
    """Tells whether it is read by nodes of the group alone."""
    readers = graph.consumers[graph.position[name]]
    return bool(readers) and all(graph.names[reader] in group for reader in readers)


def _only_reader(readers: Sequence[str], of_node: Mapping[str, _Group]) -> _Group | None:
    """Returns the group of all readers, None if there are several or none."""
    groups = {id(of_node[name]): of_node[name] for name in readers}
    return next(iter(groups.values())) if len(groups) == 1 else None


def _join(
    group: _Group, members: Sequence[str], anchored: bool, of_node: dict[str, _Group]
) -> None:
    group.members += members
    group.anchored |= anchored
    of_node.update(dict.fromkeys(members, group))

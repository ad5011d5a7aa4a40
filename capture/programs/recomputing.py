"""Selective recomputation in a joint graph: what some nodes compute is not kept for the backward
pass, which computes it again.

As in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
with any nodes. Operators of the backward pass read copies of forward ones, each made just before
the first that needs it. So all devices of a mesh come to the same collectives in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Set

from torch import fx

from pipedream.capture.programs.attribution import node_of
from pipedream.capture.programs.batch_norms import DividedBatchNorm
from pipedream.capture.programs.joint import Joint
from pipedream.capture.programs.localize import Redistribution
from pipedream.capture.programs.split_passes import computed_by, memory_of, writes
from pipedream.capture.rewrites.arguments import arguments
from pipedream.capture.rewrites.writes import STATISTICS, declared, is_draw, written


def recompute(joint: Joint, nodes: Collection[str]) -> None:
    """Has the operators of these graph nodes run again, in place: for the gradients, where these
    read what they compute. The operators have labels (`GraphNodes.joint`); a redistribution runs
    again with what it moves, or if nothing else reads what it makes.

    Kept is what is drawn, attention with dropout among it, and what reads a buffer that the forward
    pass changes. Batch norms run again without statistics.
    """
    graph = joint.module.graph
    forward = computed_by([*joint.outputs, *writes(joint)])
    again = _again(joint, forward, nodes)
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node not in forward:
            for source in _missing(node.all_input_nodes, again, copies):
                with graph.inserting_before(node):
                    copies[source] = _copy(source, copies)
            node.args = fx.node.map_arg(node.args, lambda each: copies.get(each, each))
            node.kwargs = fx.node.map_arg(node.kwargs, lambda each: copies.get(each, each))
    joint.module.recompile()


def _again(joint: Joint, forward: Set[fx.Node], nodes: Collection[str]) -> Set[fx.Node]:
    """The operators that run again, where they are needed."""
    graph = joint.module.graph
    changed = {memory_of(buffer) for node in graph.nodes for buffer in _changed(node)}
    again, moved = set[fx.Node](), list[fx.Node]()
    for node in graph.nodes:
        if node not in forward:
            continue
        if isinstance(node.target, Redistribution):
            moved.append(node)
        if node.target is operator.getitem or isinstance(node.target, Redistribution):
            repeated = node.args[0] in again
        else:
            reads = {memory_of(source) for source in node.all_input_nodes}
            norm = _is_batch_norm(node)
            repeated = node_of(node) in nodes and (norm or changed.isdisjoint(reads))
        if repeated and not is_draw(node) and not any(True for _ in declared(node)):
            again.add(node)
    return again | {node for node in moved if again.issuperset(node.users)}


def _missing(
    wanted: Collection[fx.Node], again: Set[fx.Node], copies: Mapping[fx.Node, fx.Node]
) -> list[fx.Node]:
    """What is to run before the `wanted` can be read, in the order of the forward pass."""
    missing = set[fx.Node]()
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node in again and node not in copies and node not in missing:
            missing.add(node)
            waiting += node.all_input_nodes
    return sorted(missing)


def _copy(node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Copies an operator, which reads copies where there are some."""
    copy = node.graph.node_copy(node, lambda each: copies.get(each, each))
    if isinstance(node.target, DividedBatchNorm):
        copy.target = node.target.without_statistics()
    elif _is_batch_norm(node):
        for place, (argument, _) in enumerate(arguments(node)):
            if argument.name in STATISTICS:
                copy.update_arg(place, None)
    return copy


def _changed(node: fx.Node) -> Iterator[fx.Node]:
    """What an operator writes into, statistics of batch norms among it."""
    yield from written(node)
    if isinstance(node.target, DividedBatchNorm):
        yield from node.target.statistics(node.args)


def _is_batch_norm(node: fx.Node) -> bool:
    """Tells whether an operator updates statistics, and computes nothing from them."""
    silent = set(written(node)) - set(declared(node))
    return isinstance(node.target, DividedBatchNorm) or bool(silent)

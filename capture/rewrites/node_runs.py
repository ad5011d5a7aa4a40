"""A module as runs of adjacent operators, alternately marked and not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor, fx

from pipedream.capture.rewrites.drawn_apart import is_seed


@dataclass(frozen=True, eq=False)
class NodeRun:
    """Operators that follow one another: `module(*inputs, *state) -> tuple of outputs`.

    `inputs` and `outputs` are names of values, `state` of parameters and buffers. `unread`: values
    that no later run reads, and the whole module does not return.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    state: tuple[str, ...]
    outputs: tuple[str, ...]
    unread: tuple[str, ...]
    marked: bool


def node_runs(module: fx.GraphModule, marked: Callable[[fx.Node], bool]) -> list[NodeRun]:
    """Divides `module`, which returns a tuple of values, into runs that do the same in turn."""
    groups = [
        (mark, [node for node, _ in pairs])
        for mark, pairs in groupby(_marks(module.graph, marked), key=operator.itemgetter(1))
    ]
    (output,) = module.graph.find_nodes(op="output")
    last = {node: len(groups) for node in output.all_input_nodes}
    for number, (_, nodes) in reversed(list(enumerate(groups))):
        for source in (source for node in nodes for source in node.all_input_nodes):
            last.setdefault(source, number)
    return [_run(module, *group, number, last) for number, group in enumerate(groups)]


def _marks(graph: fx.Graph, marked: Callable[[fx.Node], bool]) -> Iterator[tuple[fx.Node, bool]]:
    """Yields the operators in order, and whether they are marked. A seed goes with the draw after
    it, and parts of a tuple follow the operator that gives it.
    """
    seeds: list[fx.Node] = []
    for node in graph.nodes:
        if node.op not in ("call_function", "call_module") or _of_tuple(node):
            continue
        if is_seed(node):
            seeds.append(node)
            continue
        mark = marked(node)
        yield from ((each, mark) for each in (*seeds, node, *_parts(node)))
        seeds = []


def _of_tuple(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _parts(node: fx.Node) -> Iterator[fx.Node]:
    for user in filter(_of_tuple, node.users):
        yield user
        yield from _parts(user)


def _run(
    module: fx.GraphModule, mark: bool, nodes: list[fx.Node], number: int, last: dict[fx.Node, int]
) -> NodeRun:
    """Run `number` of these nodes; `last`: the last run that reads a node, as a number."""
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
    own = set(nodes)
    state = [node for node in read if node.op == "get_attr" and _is_tensor(node)]
    inputs = [node for node in read if node.op != "get_attr" and node not in own]
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for source in (*inputs, *state):
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    for source in read:
        if source.op == "get_attr" and source not in copies:
            copies[source] = graph.node_copy(source)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs = [node for node in nodes if last.get(node, number) > number]
    graph.output(tuple(copies[node] for node in outputs))
    return NodeRun(
        fx.GraphModule(module, graph),
        tuple(node.name for node in inputs),
        tuple(str(node.target) for node in state),
        tuple(node.name for node in outputs),
        tuple(node.name for node in inputs if last[node] == number),
        mark,
    )


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(operator.attrgetter(str(node.target))(node.graph.owning_module), Tensor)

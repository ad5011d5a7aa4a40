"""What a model computes from nothing that varies: masks from `arange`, rotary tables, zero states.

It is no layer: every piece of the model that reads such a value makes it for itself, so it needs no
node in the graph, crosses no cut, and adds no source that the planner would have to place.
"""

from __future__ import annotations

import torch
from torch import fx

from pipedream.capture.functionalize import writes_shared_memory, written


def constants(module: fx.GraphModule) -> frozenset[fx.Node]:
    """The operators that depend on no input, parameter, random number or changing buffer."""
    varying = {node for together in writes_shared_memory(module) for node in together}
    states = [written(node) for node in module.graph.nodes]
    changing = {state.target for state in states if state is not None and state.op == "get_attr"}
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        if (node.op == "get_attr" and node.target not in parameters | changing) or (
            node.op == "call_function"
            and node not in varying
            and not _random_or_writing(node)
            and found.issuperset(node.all_input_nodes)
        ):
            found.add(node)
    (output,) = module.graph.find_nodes(op="output")
    for node in found.intersection(output.all_input_nodes):
        found -= _made_from(node)
    return frozenset(node for node in found if node.op == "call_function")


def _random_or_writing(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return written(node) is not None or torch.Tag.nondeterministic_seeded in node.target.tags


def _made_from(node: fx.Node) -> set[fx.Node]:
    made, waiting = {node}, [node]
    while waiting:
        sources = set(waiting.pop().all_input_nodes) - made
        made |= sources
        waiting += sources
    return made

"""Finds constants: values that depend on no input or parameter, such as masks and rotary tables.

Constants are not nodes of the graph. Every part of the model that reads one computes it itself, so
constants cross no cut and add no sources that the planner would have to place.
"""

from __future__ import annotations

import torch
from torch import fx

from pipedream.capture.rewrites.functionalize import writes_shared_memory
from pipedream.capture.rewrites.writes import reachable, targets


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
            and not _random_or_writing(node)
            and fixed.issuperset(node.all_input_nodes)
        ):
            fixed.add(node)
    (output,) = module.graph.find_nodes(op="output")
    for node in fixed.intersection(output.all_input_nodes):
        fixed -= reachable(node, lambda each: each.all_input_nodes)
    return frozenset(node for node in fixed if node.op == "call_function")


def _random_or_writing(node: fx.Node) -> bool:
    if targets(node):
        return True
    drawing = torch.Tag.nondeterministic_seeded
    return isinstance(node.target, torch._ops.OpOverload) and drawing in node.target.tags

"""What depends on no minibatch is computed once, not for each: masks, rotary tables."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from pipedream.capture.segment import Segment


def freeze_constants(part: Segment, owned: Collection[str]) -> Segment:
    """Puts buffers in place of the operators whose names are not in `owned` (`Captured.owner`).

    Those are the constants that every piece makes for itself. In place; returns `part`. Call it
    once the segment is on its device.
    """
    graph = part.module.graph
    fixed = [node for node in graph.nodes if node.op == "call_function" and node.name not in owned]
    made: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        if node not in made:
            assert node.op == "get_attr", f"{node} is no constant"
            made[node] = operator.attrgetter(str(node.target))(part.module)
        return made[node]

    with torch.no_grad():
        for node in fixed:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
            assert callable(node.target)
            made[node] = node.target(*args, **kwargs)
    for node in fixed:
        if isinstance(made[node], Tensor):
            _replace(part.module, node, made[node])
    graph.eliminate_dead_code()
    part.module.recompile()
    return part


def _replace(module: fx.GraphModule, node: fx.Node, value: Tensor) -> None:
    name = f"constant_{node.name}"
    module.register_buffer(name, value, persistent=False)
    with module.graph.inserting_before(node):
        node.replace_all_uses_with(module.graph.get_attr(name))

"""Which gradients have memory of their own, so that others can be added to them in place."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping

import torch
from torch import fx

_HIDDEN_VIEWS = (torch.ops.aten._unsafe_view.default,)
"""Operators whose schemas do not say that their results share memory with an argument."""


def own_memory(gradients: Mapping[str, fx.Node | None]) -> frozenset[str]:
    """Returns the names of the gradients whose memory no other value of the graph shares."""
    times = Counter(gradients.values())
    return frozenset(
        name for name, node in gradients.items() if node and times[node] == 1 and _is_alone(node)
    )


def _is_alone(node: fx.Node) -> bool:
    """Tells whether there is one way from the operator that allocates to this value and to
    nowhere.
    """
    while node.op == "call_function" and len(node.users) == 1:
        source = node.args[0] if node.args else None
        if node.target is operator.getitem:
            assert isinstance(source, fx.Node)
            if not shares(source):
                return True
        elif not shares(node):
            return True
        if not isinstance(source, fx.Node):
            return False
        node = source
    return False


def shares(node: fx.Node) -> bool:
    """Tells whether a result may share memory with an argument."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target in _HIDDEN_VIEWS:
        return True
    arguments = node.target._schema.arguments
    return any(argument.alias_info is not None for argument in arguments)

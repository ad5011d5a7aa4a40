"""Batch norms of cuDNN and MIOpen in a joint graph, written as torch's own.

On a GPU autograd records those of the vendor's library. Their backward passes read what forward
ones keep in a format that is nobody else's, so they cannot be divided by rules, and torch's own
compute the same from the same statistics.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from pipedream.capture.programs.joint import Joint

_aten = torch.ops.aten
_FORWARD = (_aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default)
"""Their arguments are those of torch's own; cuDNN's has a fourth output for its backward pass."""
_BACKWARD = (_aten.cudnn_batch_norm_backward.default, _aten.miopen_batch_norm_backward.default)
"""In training alone. Arguments: data, gradient, weight, running and saved statistics, eps."""


def use_native_batch_norms(joint: Joint) -> Joint:
    """The graph is changed in place: what it computes differs by rounding alone."""
    graph = joint.module.graph
    for node in reversed(graph.nodes):
        if node.target in _BACKWARD:
            _replace_backward(node)
        elif node.target in _FORWARD:
            _drop_unread(graph, node)
            node.target = _aten.native_batch_norm.default
            node.meta["val"] = node.meta["val"][:3]
    joint.module.recompile()
    return joint


def _replace_backward(node: fx.Node) -> None:
    data, gradient, *others = node.args[:7]
    wanted = [any(user.args[1] == k for user in node.users) for k in range(3)]
    node.target = _aten.native_batch_norm_backward.default
    node.args = (gradient, data, *others, True, node.args[7], wanted)


def _drop_unread(graph: fx.Graph, node: fx.Node) -> None:
    """Removes what only the backward pass of the library would have read."""
    for user in list(node.users):
        if user.target is operator.getitem and not user.users:
            graph.erase_node(user)

"""Means and batch norms of a joint graph written as operators that can be divided.

Means become sums and divisions: a device that has some of the elements can add them up, but it
would divide by its own number of elements. The mean of a loss of classes is divided by the sum of
the weights of the targets, which the operator gives as its second output.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import torch
from torch import fx

from pipedream.capture.programs.joint import Joint

_aten = torch.ops.aten
_MEAN, _SUM = 1, 2
"""torch's numbers for the reductions of a loss."""
_LOSSES = {
    _aten.mse_loss.default: 2,
    _aten.smooth_l1_loss.default: 2,
    _aten.huber_loss.default: 2,
    _aten.soft_margin_loss.default: 2,
    _aten.binary_cross_entropy.default: 3,
    _aten.binary_cross_entropy_with_logits.default: 4,
}
"""Losses of each element, and which of their arguments is the reduction."""
_BACKWARD = {
    _aten.mse_loss_backward.default: 3,
    _aten.smooth_l1_loss_backward.default: 3,
    _aten.huber_loss_backward.default: 3,
    _aten.soft_margin_loss_backward.default: 3,
    _aten.binary_cross_entropy_backward.default: 4,
}
_CLASSES = (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
_VENDORS = (_aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default)
"""Their arguments are those of torch's own; cuDNN's has a fourth output for its backward pass."""
_VENDORS_BACKWARD = (
    _aten.cudnn_batch_norm_backward.default,
    _aten.miopen_batch_norm_backward.default,
)
"""In training alone. Arguments: data, gradient, weight, running and saved statistics, eps."""


def divisible(joint: Joint) -> Joint:
    """Returns the graph of the operators that planners and runs divide, which have to be the same:
    means are sums, batch norms torch's own. It is changed in place.
    """
    return sum_means(use_native_batch_norms(joint))


def sum_means(joint: Joint) -> Joint:
    """The graph is changed in place: what it computes differs by rounding alone."""
    graph = joint.module.graph
    ends: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target in (_aten.mean.default, _aten.mean.dim):
            ends[node] = _replace_mean(graph, node)
        elif node.target in _LOSSES:
            ends[node] = _replace_loss(graph, node, _LOSSES[node.target], node.args[0])
        elif node.target in _BACKWARD:
            ends[node] = _replace_loss(graph, node, _BACKWARD[node.target], node.args[1])
        elif node.target in _CLASSES and node.args[3] == _MEAN:
            ends |= _replace_class_loss(graph, node)
    if not ends:
        return joint
    joint.module.recompile()
    gradients = joint.weight_gradients.items()
    return replace(
        joint,
        outputs=[ends.get(node, node) for node in joint.outputs],
        input_gradients=[node and ends.get(node, node) for node in joint.input_gradients],
        weight_gradients={name: node and ends.get(node, node) for name, node in gradients},
    )


def _replace_mean(graph: fx.Graph, node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    with graph.inserting_before(node):
        if node.target is _aten.mean.default:
            total = graph.call_function(_aten.sum.default, (source,), node.kwargs)
        else:
            total = graph.call_function(_aten.sum.dim_IntList, node.args, node.kwargs)
    total.meta = dict(node.meta)
    elements, means = source.meta["val"].numel(), node.meta["val"].numel()
    return _divide(graph, node, total, elements / means if means else math.nan)


def _replace_loss(graph: fx.Graph, node: fx.Node, position: int, data: object) -> fx.Node:
    """Sums and divides, which the gradient does, too; a reduction left out is a mean."""
    assert isinstance(data, fx.Node)
    if len(node.args) > position and node.args[position] != _MEAN:
        return node
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    defaults = [argument.default_value for argument in schema[len(node.args) : position]]
    arguments = [*node.args, *defaults]
    arguments[position:] = [_SUM, *node.args[position + 1 :]]
    with graph.inserting_before(node):
        total = graph.call_function(node.target, tuple(arguments), node.kwargs)  # type: ignore[arg-type]
    total.meta = dict(node.meta)
    return _divide(graph, node, total, data.meta["val"].numel())


def _replace_class_loss(graph: fx.Graph, node: fx.Node) -> dict[fx.Node, fx.Node]:
    node.update_arg(3, _SUM)
    means = {}
    for loss in [user for user in node.users if user.args[1] == 0]:
        with graph.inserting_after(loss):
            weight = graph.call_function(operator.getitem, (node, 1))
        weight.meta["val"] = node.meta["val"][1]
        with graph.inserting_after(weight):
            mean = graph.call_function(_aten.div.Tensor, (loss, weight))
        mean.meta = dict(loss.meta)
        loss.replace_all_uses_with(mean)
        mean.update_arg(0, loss)
        means[loss] = mean
    return means


def _divide(graph: fx.Graph, node: fx.Node, total: fx.Node, by: float) -> fx.Node:
    with graph.inserting_after(total):
        mean = graph.call_function(_aten.div.Tensor, (total, by))
    mean.meta = dict(node.meta)
    node.replace_all_uses_with(mean)
    graph.erase_node(node)
    return mean


def use_native_batch_norms(joint: Joint) -> Joint:
    """Makes batch norms of cuDNN and MIOpen torch's own, in place; all differs by rounding alone.

    On a GPU autograd records those of the vendor's library. Their backward passes read what forward
    ones keep in a format that is nobody else's, so they cannot be divided by rules, and torch's own
    compute the same from the same statistics.
    """
    graph = joint.module.graph
    if not any(node.target in (*_VENDORS, *_VENDORS_BACKWARD) for node in graph.nodes):
        return joint
    for node in reversed(graph.nodes):
        if node.target in _VENDORS_BACKWARD:
            _replace_backward(node)
        elif node.target in _VENDORS:
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

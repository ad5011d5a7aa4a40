"""Views of a value: made again of another value, and a value in which a view has other contents."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_SCATTER = {
    _aten.select.int: _aten.select_scatter.default,
    _aten.slice.Tensor: _aten.slice_scatter.default,
    _aten.diagonal.default: _aten.diagonal_scatter.default,
}
"""Given the whole, the new part, and the other arguments of the view."""
_SAME_AGAIN = (_aten.transpose.int, _aten.t.default, _aten.swapaxes.default, _aten.swapdims.default)
"""Of the view with the same arguments it is the whole."""
_SAME_ELEMENTS = (
    *(_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.view_as.default),
    *(_aten.flatten.using_ints, _aten.unflatten.int, _aten.unsqueeze.default),
    *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.reshape_as.default),
)
"""In the same order, in another shape."""
_IDENTITIES = (
    *(
        _aten.alias.default,
        _aten.contiguous.default,
        _aten.dropout.default,
        _aten.lift_fresh.default,
    ),
    *(_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten.type_as.default),
)
"""Where they share memory they are what they are given."""


def source_of(node: fx.Node) -> fx.Node | None:
    """Returns the value that `node` may be a view of, or that it writes into."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        several = node.args[0]
        return source_of(several) if isinstance(several.target, torch._ops.OpOverload) else None
    return node.args[0] if isinstance(node.target, torch._ops.OpOverload) else None


def emit(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: fx.Node
) -> fx.Node:
    """Adds an operator with the meta of `like`, and the shape of what it gives."""
    node = graph.call_function(target, args, dict(kwargs))
    node.meta = {**like.meta, "val": None}
    with torch.no_grad():
        fake_args, fake_kwargs = fx.map_arg((args, dict(kwargs)), lambda each: each.meta["val"])
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def view_again(view: fx.Node, value: fx.Node, like: fx.Node) -> fx.Node:
    """Adds the same view of `value`."""
    graph = view.graph
    if view.target is operator.getitem:
        several, number = view.args
        assert isinstance(several, fx.Node)
        again = emit(graph, several.target, (value, *several.args[1:]), several.kwargs, like)
        return emit(graph, operator.getitem, (again, number), {}, like)
    return emit(graph, view.target, (value, *view.args[1:]), view.kwargs, like)


def can_be_replaced(view: fx.Node) -> bool:
    """Tells whether `replaced` knows this view."""
    known = (*_SCATTER, *_SAME_AGAIN, *_SAME_ELEMENTS, *_IDENTITIES, _aten.detach.default)
    return view.target in known or view.target is _aten.permute.default


def replaced(whole: fx.Node, view: fx.Node, part: fx.Node, like: fx.Node) -> fx.Node:
    """Returns `whole`, where `view` of it has the contents of `part`."""
    graph, target = whole.graph, view.target
    if target in _SCATTER:
        return emit(graph, _SCATTER[target], (whole, part, *view.args[1:]), view.kwargs, like)
    if target in _SAME_AGAIN:
        return emit(graph, target, (part, *view.args[1:]), view.kwargs, like)
    if target is _aten.permute.default:
        order = [each % len(view.args[1]) for each in view.args[1]]  # type: ignore
        back = [order.index(dim) for dim in range(len(order))]
        return emit(graph, target, (part, back), {}, like)
    if target in _SAME_ELEMENTS:
        shape = list(whole.meta["val"].shape)
        return emit(graph, _aten.reshape.default, (part, shape), {}, like)
    if target is _aten.detach.default:
        return emit(graph, target, (part,), {}, like)
    assert target in _IDENTITIES, target
    return part

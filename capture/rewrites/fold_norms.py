"""Batch norms of what a convolution gives, as part of the weights of that convolution.

With fixed statistics a batch norm scales channels and adds to them, which a convolution can do by
itself: its weight times the scale, and another bias. What is computed anew in each pass is then as
large as the weight, not as the result. Parameters and buffers stay as they are, so that what they
learn in between counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, fx

_NORM = torch.ops.aten.batch_norm.default
_CONVOLUTIONS: Mapping[object, int] = {
    getattr(torch.ops.aten, f"conv{dims}d").default: dims for dims in (1, 2, 3)
}
"""With their dimensions of space."""


def fold_norms(module: fx.GraphModule) -> int:
    """Folds what it can, in place; returns how many. For modules that do not learn."""
    graph, count = module.graph, 0
    for norm in graph.find_nodes(op="call_function", target=_NORM):
        convolution = _convolution(norm)
        if convolution is None:
            continue
        count += 1
        x, weight, *more = convolution.args
        bias, rest = (more[0], more[1:]) if more else (None, more)
        scaled, shift, mean, variance = norm.args[1:5]
        space = _CONVOLUTIONS[convolution.target]
        with graph.inserting_before(norm):
            scale = graph.call_function(_scale, (scaled, variance, norm.args[7]))
            weights = graph.call_function(_weight, (weight, scale, (-1, *(1,) * (space + 1))))
            biases = graph.call_function(_bias, (bias, scale, shift, mean))
            folded = graph.call_function(
                convolution.target,  # type: ignore[arg-type]
                (x, weights, biases, *rest),
                convolution.kwargs,
            )
        folded.meta = dict(norm.meta)
        norm.replace_all_uses_with(folded)
        graph.erase_node(norm)
        graph.erase_node(convolution)
    module.recompile()
    return count


def _convolution(norm: fx.Node) -> fx.Node | None:
    """Returns the one whose result this norm alone reads, if it can be folded into it, and if its
    weight is smaller than its result.
    """
    read, _, _, mean, variance, trains = norm.args[:6]
    if not isinstance(read, fx.Node) or read.target not in _CONVOLUTIONS or len(read.users) > 1:
        return None
    if trains or mean is None or variance is None:
        return None
    weight = read.args[1]
    given = [each for each in (read, weight, *norm.args[1:5]) if isinstance(each, fx.Node)]
    tensors = [each.meta["val"] for each in given if isinstance(each.meta.get("val"), Tensor)]
    if len(tensors) < len(given):
        return None
    result, own, *others = tensors
    same = all(each.dtype == result.dtype for each in (own, *others))
    return read if same and math.prod(own.shape) < math.prod(result.shape) else None


def _scale(weight: Tensor | None, variance: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(variance + eps)
    return scale if weight is None else weight * scale


def _weight(weight: Tensor, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    return weight * scale.reshape(shape)


def _bias(bias: Tensor | None, scale: Tensor, shift: Tensor | None, mean: Tensor) -> Tensor:
    moved = -mean if bias is None else bias - mean
    return moved * scale if shift is None else torch.addcmul(shift, moved, scale)

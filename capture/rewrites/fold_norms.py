"""Batch norms of what a convolution gives, as part of the weights of that convolution.

With fixed statistics a batch norm scales channels and adds to them, which a convolution can do by
itself: its weight times the scale, and another bias. These are computed once for all minibatches
that are evaluated with the same parameters and buffers, which stay as they are: computed in each
pass, they took as long as the norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from pipedream.capture.module_tensors import ModuleTensors

_NORM = torch.ops.aten.batch_norm.default
_CONVOLUTIONS: Mapping[object, int] = {
    getattr(torch.ops.aten, f"conv{dims}d").default: dims for dims in (1, 2, 3)
}
"""With their dimensions of space."""


@dataclass(frozen=True)
class _Fold:
    """The names of tensors that a convolution, with so many dimensions of `space`, and its norm
    read, None for one that they lack; and the names of what the convolution then reads.
    """

    weight: str
    bias: str | None
    scale: str | None
    shift: str | None
    mean: str
    variance: str
    eps: float
    space: int
    folded: tuple[str, str]

    def values(self, state: ModuleTensors, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        def find(name: str) -> Tensor:
            return state.find(name, tensors)

        scale = torch.rsqrt(find(self.variance) + self.eps)
        if self.scale is not None:
            scale = scale * find(self.scale)
        bias = -find(self.mean) if self.bias is None else find(self.bias) - find(self.mean)
        bias = bias * scale if self.shift is None else bias * scale + find(self.shift)
        return find(self.weight) * scale.reshape(-1, *(1,) * (self.space + 1)), bias


@dataclass(frozen=True)
class FoldedNorms:
    """What a module reads in place of weights and norms; to be given to it with its tensors."""

    state: ModuleTensors
    folds: Sequence[_Fold]

    def values(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns it by name, for these parameters and buffers of the module."""
        return {
            name: value
            for fold in self.folds
            for name, value in zip(fold.folded, fold.values(self.state, tensors), strict=True)
        }


def fold_norms(module: fx.GraphModule) -> FoldedNorms:
    """Folds what it can, in place. For modules that do not learn."""
    state, folds = ModuleTensors.of(module), list[_Fold]()
    for norm in module.graph.find_nodes(op="call_function", target=_NORM):
        fold = _fold(norm, len(folds))
        if fold is not None:
            folds.append(fold)
            _replace(module, norm, fold)
    module.recompile()
    return FoldedNorms(state, folds)


def _fold(norm: fx.Node, number: int) -> _Fold | None:
    """Returns how it is folded into the convolution whose result it alone reads; None if not."""
    read, scale, shift, mean, variance, trains, _, eps, *_ = norm.args
    if not isinstance(read, fx.Node) or read.target not in _CONVOLUTIONS or len(read.users) > 1:
        return None
    if trains or mean is None or variance is None:
        return None
    _, weight, *more = read.args
    tensors = (weight, more[0] if more else None, scale, shift, mean, variance)
    given = [each for each in tensors if isinstance(each, fx.Node)]
    values = [each.meta.get("val") for each in (read, *given)]
    types = {value.dtype if isinstance(value, Tensor) else None for value in values}
    if any(each.op != "get_attr" for each in given) or len(types) > 1 or None in types:
        return None
    assert isinstance(eps, float)
    bias, scale, shift = (str(n.target) if isinstance(n, fx.Node) else None for n in tensors[1:4])
    return _Fold(
        weight=_name(weight),
        bias=bias,
        scale=scale,
        shift=shift,
        mean=_name(mean),
        variance=_name(variance),
        eps=eps,
        space=_CONVOLUTIONS[read.target],
        folded=(f"folded_weight_{number}", f"folded_bias_{number}"),
    )


def _name(tensor: object) -> str:
    assert isinstance(tensor, fx.Node)
    return str(tensor.target)


def _replace(module: fx.GraphModule, norm: fx.Node, fold: _Fold) -> None:
    graph, (convolution, *_) = module.graph, norm.args
    assert isinstance(convolution, fx.Node)
    x, _, *more = convolution.args
    for name in fold.folded:  # a pass without what is to be given for it fails
        module.register_buffer(name, torch.empty(0), persistent=False)
    with graph.inserting_before(norm):
        weight, bias = map(graph.get_attr, fold.folded)
        folded = graph.call_function(
            convolution.target,  # type: ignore[arg-type]
            (x, weight, bias, *more[1:]),
            convolution.kwargs,
        )
    folded.meta = dict(norm.meta)
    norm.replace_all_uses_with(folded)
    graph.erase_node(norm)
    graph.erase_node(convolution)

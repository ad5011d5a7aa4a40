"""What rounding does to the figures of a pass: in which types operators compute, and the pass again
with all numbers moved a little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_JUMPING = {
    f"aten::{name}"
    for name in (
        *("relu", "relu_", "relu6", "relu6_", "leaky_relu", "leaky_relu_", "prelu", "threshold"),
        *("hardtanh", "hardtanh_", "hardswish", "hardswish_", "hardsigmoid", "hardsigmoid_"),
        *("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices"),
        *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
        *("abs", "clamp", "clamp_", "clamp_min", "clamp_max", "max", "min", "maximum", "minimum"),
        *("amax", "amin", "topk", "sort", "sign", "round", "floor", "ceil", "l1_loss"),
    )
}
"""Operators whose derivative is another on either side of a number: a sum that is added up in
another order may come to lie on the other.
"""


class ComputeTypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the `types` of all results that depend on parameters: of complex ones that of a part.

    Often these are not those of the parameters alone: models in float64 may compute norms,
    attention or the loss in float32, operators under autocast in bfloat16.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in arguments):
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                    self.types.add(leaf.dtype.to_real())
        return result


class RoundedOtherwise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Each number that an operator computes is moved at random by up to half a unit of rounding, as
    another order of a sum might have moved it. Whole numbers stay: counts, masks.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        reads = any(isinstance(each, Tensor) for each in pytree.tree_leaves((args, kwargs)))
        renames = any(each.alias_info is not None for each in func._schema.returns)
        if not reads or renames:
            return results
        return pytree.tree_map_only(Tensor, self._moved, results)

    def _moved(self, result: Tensor) -> Tensor:
        if not result.is_floating_point() or result.numel() == 0:
            return result
        if result.device not in self.draws:
            self.draws[result.device] = torch.Generator(result.device).manual_seed(0)
        most = torch.finfo(result.dtype).eps / 2
        noise = torch.empty_like(result).uniform_(-most, most, generator=self.draws[result.device])
        whole = result == result.round()
        return torch.where(whole, result, torch.addcmul(result, result, noise))


def moved_at_random(parameters: Mapping[str, Tensor], most: float) -> dict[str, Tensor]:
    """Copies of the parameters, each number changed at random by at most this part of itself."""
    generator = torch.Generator().manual_seed(0)

    def moved(tensor: Tensor) -> Tensor:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        noise = torch.empty(real.shape, dtype=torch.promote_types(real.dtype, torch.float32))
        noise = noise.uniform_(-most, most, generator=generator).to(real.device)
        changed = torch.addcmul(real.to(noise.dtype), real, noise).to(real.dtype)
        return torch.view_as_complex(changed) if tensor.is_complex() else changed

    return {n: moved(each.detach()).requires_grad_() for n, each in parameters.items()}


@contextmanager
def moved_inside(module: nn.Module, most: float) -> Iterator[None]:
    """Inside, parameters that learn are `moved_at_random`; afterwards they are as before."""
    parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
    kept = {name: each.data for name, each in parameters.items()}
    try:
        for name, moved in moved_at_random(kept, most).items():
            parameters[name].data = moved.data
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = kept[name]


def may_jump(module: fx.GraphModule) -> bool:
    """Tells whether a gradient may jump where a number moves by a unit of rounding."""
    return any(
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.overloadpacket._qualified_op_name in _JUMPING
        for node in module.graph.nodes
    )

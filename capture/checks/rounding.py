"""What rounding does to the figures of a pass: in which types operators compute, and the pass again
with all numbers moved a little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


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


def rounded_once(parameters: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies of the parameters, each number changed at random by at most one unit of rounding."""
    generator, unit = torch.Generator().manual_seed(0), torch.finfo(dtype).eps

    def rounded(tensor: Tensor) -> Tensor:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        noise = torch.empty(real.shape, dtype=torch.promote_types(real.dtype, torch.float32))
        noise = noise.uniform_(-unit, unit, generator=generator).to(real.device)
        changed = torch.addcmul(real.to(noise.dtype), real, noise).to(real.dtype)
        return torch.view_as_complex(changed) if tensor.is_complex() else changed

    return {n: rounded(each.detach()).requires_grad_() for n, each in parameters.items()}

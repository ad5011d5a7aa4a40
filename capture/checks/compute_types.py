"""In which types a model computes: often not in that of its parameters alone.

Models in float64 may compute norms, attention or the loss in float32, operators under autocast in
bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class ComputeTypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the `types` of all results that depend on parameters: floating, of complex ones those
    of their parts.
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

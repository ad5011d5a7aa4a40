"""Complex tensors in files of a format that has none: as pairs of numbers, under a name that says
so. A tensor [...] becomes one [..., 2].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_MARK = "@complex"


def as_pairs(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors by the names that they have in files; pairs are in the same memory."""
    return {
        f"{name}{_MARK}" if tensor.is_complex() else name: (
            torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
        )
        for name, tensor in tensors.items()
    }


def from_pairs(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        plain_name(name): torch.view_as_complex(tensor) if name.endswith(_MARK) else tensor
        for name, tensor in tensors.items()
    }


def plain_name(name: str) -> str:
    """Returns the name of the tensor in the model."""
    return name.removesuffix(_MARK)

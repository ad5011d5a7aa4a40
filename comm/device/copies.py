"""Copies that cost a host and its GPU little."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies, of each (target, source), the source into the target, of the same shape.

    On a GPU those of a type are one kernel, or a few: one for each tensor takes the host longer to
    give than the GPU to do.
    """
    of_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        targets, sources = of_type.setdefault(target.dtype, ([], []))
        targets.append(target)
        sources.append(source)
    for targets, sources in of_type.values():
        torch._foreach_copy_(targets, sources)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on `device`. The host does not wait for what a GPU has to do before.

    Page-locked memory of torch's own is not used again before the copy is done. That of the caller
    may be: its copy is waited for.
    """
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.is_pinned():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)

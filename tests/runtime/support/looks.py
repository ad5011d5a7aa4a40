"""Counts where the host would wait for a GPU, of passes on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_LOOKS = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten._unique2}
"""What needs the values of tensors, or makes a tensor of a size that depends on them: `item`,
`float`, `bool`, `tolist` of one value and an index with a mask among them.
"""

_BROUGHT = {aten.lift_fresh}
"""What `torch.tensor` does: its numbers are copied to a device while the host waits."""


class Looks(TorchDispatchMode):
    """A context; `found` are the operators in it, of this thread, that a GPU would be waited for
    at.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function.overloadpacket in _LOOKS | _BROUGHT:
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))

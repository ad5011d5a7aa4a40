"""A tensor of a GPU on its way to the host, which meanwhile gives the GPU more to do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HostCopy:
    """`tensor` is on the host, and has its value when `done`; None: at once."""

    tensor: Tensor
    done: torch.cuda.Event | None

    @staticmethod
    def begin(tensor: Tensor) -> HostCopy:
        """Begins to copy a tensor as it will be when all is done that its GPU has to do by now; one
        of the host stays as it is.
        """
        if tensor.device.type != "cuda":
            return HostCopy(tensor, None)
        # Into page-locked memory: any other copy waits for the GPU.
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(tensor.device))
        return HostCopy(pinned, done)

    def wait(self) -> Tensor:
        """Waits for this copy alone, not for what the GPU was given later."""
        if self.done is not None:
            self.done.synchronize()
        return self.tensor

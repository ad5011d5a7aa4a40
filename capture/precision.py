"""The lower precision of a run config, for profiling and training."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def lowered(autocast: str | None, device: torch.device) -> AbstractContextManager[Any]:
    """A context in which operators compute in the type `autocast` if torch considers that safe."""
    if autocast is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, autocast))

"""The lower precision that a run config asks for, the same where it is profiled and trained."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def lowered(autocast: str | None, device: torch.device) -> AbstractContextManager[Any]:
    """Operators in here compute in the type `autocast`, where torch deems that safe."""
    if autocast is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, autocast))

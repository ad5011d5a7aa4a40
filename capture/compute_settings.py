"""Settings under which a model is profiled and trained: precision and the memory allocator."""

from __future__ import annotations

import ctypes
import os
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, from malloc.h."""
_NEVER = 2**31 - 1
_LARGEST = 32 << 20
"""The highest threshold that glibc accepts; larger blocks are always returned."""
_USER_SETTINGS = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "GLIBC_TUNABLES",
)


def keep_freed_memory() -> None:
    """Makes glibc keep freed blocks of up to 32 MiB for the next use.

    By default glibc returns them to the kernel, and every activation and gradient then costs a page
    fault per 4 KiB. Settings in the environment take precedence. Other allocators are not affected.
    """
    if not os.environ.keys().isdisjoint(_USER_SETTINGS):
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _LARGEST)


def lowered(autocast: str | None, device: torch.device) -> AbstractContextManager[Any]:
    """A context in which operators compute in the type `autocast` if torch considers that safe."""
    if autocast is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, autocast))

"""What becomes of freed memory on a CPU."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of mallopt's parameters, from malloc.h."""
_NEVER = 2**31 - 1
_LARGEST = 32 << 20
"""glibc takes no higher threshold; larger blocks always go back."""
_SAID_BY_THE_USER = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "GLIBC_TUNABLES",
)


def keep_freed_memory() -> None:
    """Lets glibc's allocator keep freed blocks of up to 32 MiB for the next use.

    On its own it returns them to the kernel again and again, and each activation and gradient then
    costs a page fault for every 4 KiB of it. What the user says about it in the environment stays
    as it is. Does nothing where there is another allocator.
    """
    if not os.environ.keys().isdisjoint(_SAID_BY_THE_USER):
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _LARGEST)

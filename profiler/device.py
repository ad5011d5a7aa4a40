"""The device that a profile is measured on: its cache, and what it says when memory is full."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_CACHE_GUESS = 32 << 20
"""Bytes of a cache, at least: what reads less than there is measures what stays in it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether an error means out of memory, on a CPU too, which has no error class for it."""
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("out of memory", "allocate memory")
    )


def host_cache_bytes() -> int:
    """Returns the size of the largest cache of the first core, or a guess."""
    sizes = [_CACHE_GUESS]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(path.read_text(encoding="ascii").strip().removesuffix("K")) << 10)
    return max(sizes)

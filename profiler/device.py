"""The device that a profile is measured on: its name, and what it says when its memory is full."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path

import torch

_CACHE_GUESS = 32 << 20
"""Bytes of a cache, at least: what reads less than there is measures what stays in it."""


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU or the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


def _processor() -> str:
    """Returns the name of the CPU from /proc/cpuinfo, or Python's guess."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


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

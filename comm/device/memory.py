"""The memory of a device that is free, and on a CPU what this process holds of it."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path

import torch


def free_memory(device: torch.device) -> float:
    """Returns the bytes that may be allocated; infinite if unknown.

    On a CPU 90 % of what Linux reports as available; on a GPU including memory that torch caches.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(free + kept)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return float("inf")
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 0.9 * 1024 * kilobytes[0] if kilobytes else float("inf")


def resident_bytes(what: str = "VmRSS") -> int:
    """Returns bytes of this process: `VmRSS` now; of those `RssAnon` its own and `RssFile` of files
    that are mapped into it; `VmHWM` the most since `reset_peak_resident`. 0 where /proc has none.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{what}:"):
                return int(line.split()[1]) * 1024
    return 0


def reset_peak_resident() -> None:
    """Begins to look for the most anew. Linux alone has a high-water mark that can be reset."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def give_back_freed() -> None:
    """Lets the allocator return to the kernel what is free."""
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)

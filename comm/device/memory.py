"""The memory of a device that is free."""

from __future__ import annotations

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

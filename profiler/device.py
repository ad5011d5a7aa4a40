"""The device that a profile is measured on: its name and its free memory."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """The GPU's or the CPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


def _processor() -> str:
    """The CPU's name; Linux tells it in /proc/cpuinfo, elsewhere Python's guess must do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def free_memory(device: torch.device) -> float:
    """Bytes that may be taken; infinite where the system does not tell.

    On a CPU those that Linux deems available, of which a tenth is left to others; on a GPU also
    those that torch keeps for itself since they were freed.
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


def is_out_of_memory(error: BaseException) -> bool:
    """Also of a CPU, whose allocator has no class of its own for it."""
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("out of memory", "allocate memory")
    )

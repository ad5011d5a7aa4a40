"""How many streams torch hands out before one comes again."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gpu_check.check import Measured, Setting, Skipped

_TRIED = 200


def distinct_streams(setting: Setting) -> Measured:
    """Returns how many there are of the lower of two priorities; the other carries messages."""
    if setting.device == "cpu":
        raise Skipped("a CPU has no streams")
    counts = {
        priority: before_one_repeats(
            torch.cuda.Stream(priority=priority).cuda_stream for _ in range(_TRIED)
        )
        for priority in (0, -1)
    }
    return Measured(min(counts.values()), f"{counts[0]}, of high priority {counts[-1]}")


def before_one_repeats(handles: Iterable[int]) -> int:
    seen = set[int]()
    for handle in handles:
        if handle in seen:
            break
        seen.add(handle)
    return len(seen)

"""Marks in the work of a device, and the seconds between them."""

from __future__ import annotations

import time
from typing import Any

import torch

from pipedream.comm.device.events import timed_event
from pipedream.profiler.device import host_cache_bytes

_LEAD = 2_000_000
"""Cycles of a GPU: a millisecond or two, in which the host hands over the passes of a node."""
_PART = 4
"""After a clear, this part of what it read may be touched before the next."""
_NEAR = 32 << 20
"""Bytes that are more than the second-level cache of a core holds, and all that is found by way of
its translation of addresses.
"""
_WORD = 8
"""Bytes of what is added up to read memory."""


class Stopwatch:
    """Reads the clock: work on the CPU is done when its call returns.

    Call `clear()` before a timed pass, `mark()` in it, and `seconds` once all is queued; before a
    part of a pass that is timed alone, `lead()`. `hands_over`: calls return before work is done.
    `room`: after a `clear()`, bytes that may be touched before another is due; before each of the
    passes until then, `clear_near()`.
    """

    hands_over = False
    room = 0

    def __init__(self, between: int = 0) -> None:
        """`between`: bytes that training touches between two executions of what is timed alone;
        `clear` takes so many through the caches, as far as these can hold them.
        """
        size = min(between, 2 * host_cache_bytes())
        self.between = torch.zeros(size // _WORD, dtype=torch.int64)
        self.room = self.between.nbytes // _PART

    def clear(self) -> None:
        self.between.sum()

    def clear_near(self) -> None:
        """Leaves to what was used last, code too, the place that it has after other operators."""
        self.between[: _NEAR // _WORD].sum()

    def lead(self) -> None:
        pass

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start)


class CudaStopwatch(Stopwatch):
    """Events in the current stream of `device`, as in training, so that times are those of the GPU.

    `clear` empties the level-2 cache: in training, other minibatches and the optimizer run between
    two passes of the same layers. `lead` keeps the GPU busy while the host hands over what is
    timed: alone, a small node would take as long as that.
    """

    hands_over = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = torch.cuda.get_device_properties(device).L2_cache_size
        self.other = torch.empty(2 * size, dtype=torch.uint8, device=device)

    def clear(self) -> None:
        self.other.zero_()

    def lead(self) -> None:
        torch.cuda._sleep(_LEAD)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        return timed_event(self.device)

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        seconds = float(start.elapsed_time(end)) / 1e3
        assert seconds >= 0, "marks are read in the order in which the stream has come to them"
        return seconds


def stopwatch(device: torch.device, between: int = 0) -> Stopwatch:
    return CudaStopwatch(device) if device.type == "cuda" else Stopwatch(between)

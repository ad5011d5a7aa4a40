"""Marks in the work of a device, and the seconds between two of them."""

from __future__ import annotations

import time
from typing import Protocol, TypeVar

import torch

Mark = TypeVar("Mark")


class Stopwatch(Protocol[Mark]):
    """`mark()` stands in the order of the work; read `seconds` once the work is queued."""

    def mark(self) -> Mark: ...
    def seconds(self, start: Mark, end: Mark) -> float: ...


class CpuStopwatch:
    """Work on the CPU is done when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaStopwatch:
    """Events in the current stream of `device`: the GPU's time between them, not Python's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

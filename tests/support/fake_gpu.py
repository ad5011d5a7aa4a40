"""A GPU that only counts seconds: one stream, whose events tell when it would have come to them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

CUDA = torch.device("cuda", 0)
CALL = 1e-6
"""Seconds of the host for each use of the GPU, and for each look at its own clock."""


class FakeGpu:
    """`host` is the time of the host, `free` when the stream will have done all it was given.

    The GPU's own clock goes `fast` times as fast as the host's. Every wait of the host for it is
    counted in `waits`.
    """

    def __init__(self, fast: float = 1.0) -> None:
        self.host, self.free, self.fast, self.waits = 100.0, 0.0, fast, 0

    def launch(self, seconds: float) -> None:
        """Gives the stream work of so many seconds, and goes on."""
        self.call()
        self.free = max(self.free, self.host) + seconds

    def call(self, seconds: float = CALL) -> float:
        """The host works for so many seconds; returns its time after."""
        self.host += seconds
        return self.host

    def sleep(self, cycles: int) -> None:
        """At 1 GHz."""
        self.launch(cycles / 1e9)

    def stand_in(self, monkeypatch: pytest.MonkeyPatch, *clocks: str) -> None:
        """Takes the place of torch.cuda, and of the module `time` where these modules use it."""
        for name in clocks:
            monkeypatch.setattr(name, SimpleNamespace(perf_counter=self.call))
        for name, value in {
            "Event": lambda enable_timing: FakeEvent(self, enable_timing),
            "current_stream": lambda device: None,
            "device": lambda device: nullcontext(),
            "_sleep": self.sleep,
            "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=1 << 10),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


class FakeEvent:
    """As torch.cuda.Event: milliseconds in 32 bits, and only of what the stream has passed."""

    def __init__(self, gpu: FakeGpu, timing: bool) -> None:
        self.gpu, self.timing = gpu, timing

    def record(self, stream: object) -> None:
        self.at = max(self.gpu.free, self.gpu.call())

    def query(self) -> bool:
        return self.gpu.call() >= self.at

    def synchronize(self) -> None:
        self.gpu.waits += 1
        self.gpu.host = max(self.gpu.call(), self.at)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.timing
        assert end.timing
        if self.gpu.host < max(self.at, end.at):
            raise RuntimeError("CUDA error: device not ready")
        return float(np.float32((end.at - self.at) * self.gpu.fast * 1e3))

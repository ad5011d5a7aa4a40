"""The meter against memory of known size."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pipedream.runtime.report.peak_memory import PeakMemory

# In a process of its own: what other tests have freed, glibc may not have given back.
STRETCHES = """
import torch
from pipedream.runtime.report.peak_memory import PeakMemory

MB = 2**20
held = torch.ones(24 * MB // 4)
meter = PeakMemory(torch.device("cpu"), [held])
before = torch.ones(64 * MB // 4)  # not in a stretch that counts
del before
meter.begin()
peak = torch.ones(40 * MB // 4)
del peak
meter.end()
after = torch.ones(64 * MB // 4)
assert after.sum() == after.numel()
assert abs(meter.bytes - 64 * MB) < 4 * MB, meter.bytes
meter.begin()
meter.end()
assert abs(meter.bytes - 88 * MB) < 4 * MB, f"{meter.bytes}: what is still there counts, too"
assert meter.process > meter.aside + 88 * MB, "with Python, torch and mapped files"
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_the_most_between_begin_and_end_with_what_was_there_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STRETCHES], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


MB = 2**20


def test_on_a_gpu_the_most_of_each_figure_at_the_ends_of_stretches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a GPU of 1000 MB. What other ranks take between stretches does not count."""
    counts = {"max_allocated": 0, "reserved": 0, "max_reserved": 0, "free": 600}

    def count(name: str) -> None:
        monkeypatch.setattr(
            torch.cuda, name, lambda device: counts[name.replace("memory_", "")] * MB
        )

    count("max_memory_allocated")
    count("memory_reserved")
    count("max_memory_reserved")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (counts["free"] * MB, 1000 * MB))
    resets: list[object] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)

    meter = PeakMemory(torch.device("cuda", 0), [])
    assert (meter.bytes, meter.reserved, meter.rest) == (0, None, None)
    meter.begin()
    counts |= {"max_allocated": 200, "max_reserved": 300, "reserved": 250, "free": 650}
    meter.end()
    assert (meter.bytes, meter.reserved, meter.rest) == (200 * MB, 300 * MB, 100 * MB)
    counts["free"] = 0
    meter.begin()
    counts |= {"max_allocated": 100, "max_reserved": 350, "reserved": 350, "free": 500}
    meter.end()
    assert (meter.bytes, meter.reserved, meter.rest) == (200 * MB, 350 * MB, 150 * MB)
    assert resets == [meter.device] * 2


def test_on_a_cpu_nothing_is_said_of_a_gpu() -> None:
    meter = PeakMemory(torch.device("cpu"), [])
    meter.begin()
    meter.end()
    assert (meter.reserved, meter.rest) == (None, None)
    assert meter.process is not None

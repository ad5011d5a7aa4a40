"""The meter against memory of known size."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_the_most_between_begin_and_end_with_what_was_there_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STRETCHES], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr

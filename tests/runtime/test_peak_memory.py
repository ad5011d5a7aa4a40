"""The meter against memory of known size."""

from __future__ import annotations

import torch

from pipedream.runtime.peak_memory import PeakMemory

MB = 2**20


def test_the_most_between_begin_and_end_with_what_was_there_before() -> None:
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
    assert abs(meter.bytes - 64 * MB) < 4 * MB
    meter.begin()
    meter.end()
    assert abs(meter.bytes - 88 * MB) < 4 * MB, "what is still there counts in the next stretch"

"""What it takes to read a minibatch of the data beside the passes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from pipedream.capture.sources.load import Loaded
from pipedream.profiler.timing.data_reading import reading_seconds

CPU = torch.device("cpu")


def with_data(asked: list[Sequence[int]], seconds: float) -> Loaded:
    def read(indices: Sequence[int]) -> None:
        asked.append(indices)
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    return Loaded(nn.Identity(), (), read=read, examples=50)


def test_what_the_processor_does_counts() -> None:
    asked: list[Sequence[int]] = []
    found = reading_seconds(with_data(asked, 0.01), 4, CPU)
    assert found is not None
    assert found >= 0.01
    assert 3 <= len(asked) <= 20
    assert all(len(set(indices)) == 4 and max(indices) < 50 for indices in asked)
    assert max(max(indices) for indices in asked) >= 4, "from all over the data"


def test_reading_that_waits_takes_nothing_from_the_passes() -> None:
    loaded = Loaded(nn.Identity(), (), read=lambda indices: time.sleep(0.05), examples=50)
    found = reading_seconds(loaded, 4, CPU)
    assert found is not None
    assert found < 0.01


def test_nothing_where_there_are_no_data_or_another_device_does_the_passes() -> None:
    assert reading_seconds(Loaded(nn.Identity(), ()), 4, CPU) is None
    assert reading_seconds(with_data([], 0.01), 4, torch.device("cuda")) is None

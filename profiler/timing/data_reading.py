"""The CPU time of reading a minibatch of the data."""

from __future__ import annotations

import random
import time
from statistics import median

import torch

from pipedream.capture.sources.load import Loaded

_FEWEST, _MOST, _SECONDS = 3, 20, 2.0


def reading_seconds(loaded: Loaded, batch_size: int, device: torch.device) -> float | None:
    """CPU seconds of reading a minibatch of random examples: the median over several.

    A run reads in a thread that shares the interpreter and the core with the passes, which take
    longer by this time. None without data and for passes on another device. Raises UserError if the
    data cannot be read.
    """
    if loaded.read is None or device.type != "cpu":
        return None
    draw = random.Random(0)
    seconds: list[float] = []
    end = time.monotonic() + _SECONDS
    while len(seconds) < _FEWEST or (len(seconds) < _MOST and time.monotonic() < end):
        chosen = draw.sample(range(loaded.examples), batch_size)
        begin = time.thread_time()
        loaded.read(chosen)
        seconds.append(time.thread_time() - begin)
    return median(seconds)

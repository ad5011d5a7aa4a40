"""What it takes to read a minibatch of the data beside the passes."""

from __future__ import annotations

import random
import time
from statistics import median

import torch

from pipedream.capture.sources.load import Loaded

_FEWEST, _MOST, _SECONDS = 3, 20, 2.0


def reading_seconds(loaded: Loaded, batch_size: int, device: torch.device) -> float | None:
    """Seconds of this processor: the median over minibatches of examples drawn from all there are.

    A run reads in a thread beside the passes, with the interpreter and the core that they need, so
    that they take as much longer. None where there are no data, and where the passes are done by
    another device. Raises UserError where the data cannot be read.
    """
    if loaded.read is None or device.type != "cpu":
        return None
    draw = random.Random(0)
    found: list[float] = []
    end = time.monotonic() + _SECONDS
    while len(found) < _FEWEST or (len(found) < _MOST and time.monotonic() < end):
        chosen = draw.sample(range(loaded.examples), batch_size)
        begin = time.thread_time()
        loaded.read(chosen)
        found.append(time.thread_time() - begin)
    return median(found)

"""Which streams are stopped by one that waits, as by a receive whose sender has not come.

A stream of the GPU has one of CUDA_DEVICE_MAX_CONNECTIONS hardware queues. What cannot begin yet at
the head of a queue stops what is behind it, of whatever stream: here a kernel that comes after one
which spins.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from gpu_check.check import Measured, Setting, Skipped
from pipedream.comm.communicators import MOST_COMMUNICATORS

_SPIN, _LOOK = 0.03, 0.01
"""Seconds that a stream waits, and after which the others must have done a short kernel."""


def stopped_pairs(setting: Setting) -> Measured:
    """Returns how many pairs there are of a stream that waits and one that it stops, among those of
    as many communicators as a rank may have, and the one of its passes.
    """
    if setting.device == "cpu":
        raise Skipped("a CPU has no streams")
    streams = [torch.cuda.Stream() for _ in range(MOST_COMMUNICATORS)]
    every = [torch.cuda.default_stream(), *streams]
    cycles = int(_cycles_per_second() * _SPIN)
    _stopped_by(0, every, 1)  # loads what is used
    pairs = sum(_stopped_by(number, every, cycles) for number in range(len(every)))
    return Measured(pairs, f"of {len(every) * (len(every) - 1)}")


def _cycles_per_second() -> float:
    cycles = 10_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    begin.record()
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    end.record()
    end.synchronize()
    return cycles / (begin.elapsed_time(end) / 1e3)


def _stopped_by(waiting: int, streams: Sequence[torch.cuda.Stream], cycles: int) -> int:
    """Returns how many other streams have not done a short kernel while one waits."""
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[waiting]):
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        spun = torch.cuda.Event()
        spun.record()
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
    done = []
    for number, stream in enumerate(streams):
        if number != waiting:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
                done.append(torch.cuda.Event())
                done[-1].record()
    time.sleep(_LOOK)
    stopped = sum(not event.query() for event in done)
    assert cycles == 1 or not spun.query(), "the waiting was over before the others were looked at"
    torch.cuda.synchronize()
    return stopped

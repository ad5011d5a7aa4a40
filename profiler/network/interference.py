"""The compute time lost to messages and all-reduces that run at the same time.

gloo copies and adds on the CPU, possibly on the core that a rank computes on; NCCL uses part of the
GPU. Each rank times steps of compute, then the same steps with a message or an all-reduce started
in each and waited for some steps later, as pd-train does. The difference is lost compute time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from pipedream.profiler.network.levels import Ranks
from pipedream.profiler.network.options import Effort
from pipedream.profiler.network.wire import Wait, Wire

_WIDTH = 256
_STEPS = 8
_LATER = 2  # steps, because ranks are not always at the same step
_LEAST_SECONDS = 2e-3
_SIZES = (250e3, 16e6)
"""Bytes, typical of activations and gradient buckets."""


@dataclass(frozen=True)
class Compute:
    """Steps of compute; each has `products` matrix products."""

    wire: Wire
    products: int

    @staticmethod
    def of(wire: Wire, seconds: float) -> Compute:
        """Steps of about `seconds`; all ranks use the number of products that rank 0 measures."""
        probe = Compute(wire, 16)
        probe.seconds(lambda: None)
        each = probe.seconds(lambda: None) / 16
        (products,) = wire.broadcast([max(1.0, round(seconds / each))], 0)
        return Compute(wire, int(products))

    def seconds(self, begin: Callable[[], Wait | None]) -> float:
        """The mean seconds of a step, with a call of `begin` in each.

        Timed once the first is waited for: from then on a step has the work of one message, be it
        of those before it. Where cores are short a message takes several times as long beside
        compute as alone, and the last ones are not over when the clock is read.
        """
        left = torch.ones(_WIDTH, _WIDTH, device=self.wire.device) / _WIDTH
        right = left.clone()
        under_way: deque[Wait] = deque()
        start = 0.0
        for step in range(_LATER + _STEPS):
            if step == _LATER:
                self.wire.synchronize()
                start = time.perf_counter()
            done = begin()
            if done is not None:
                under_way.append(done)
            for _ in range(self.products):
                right = left @ right
            if len(under_way) > _LATER:
                under_way.popleft()()
        self.wire.synchronize()
        taken = time.perf_counter() - start
        while under_way:
            under_way.popleft()()
        return taken / _STEPS


def busy(
    wire: Wire,
    ranks: Ranks,
    effort: Effort,
    seconds: Callable[[float], float],
    begin: Callable[[int], Callable[[], Wait | None]],
) -> float:
    """The share of a message's time, from 0 to 1, in which the ranks at its ends cannot compute.

    Called by all ranks, which all compute, since ranks of one machine compete for cores.
    `seconds(bytes)`: the time of a message; `begin(bytes)`: a function that starts one on this
    rank. The median over sizes and repeats of the mean over ranks.
    """
    sizes = [size for size in effort.sizes if _SIZES[0] <= size <= _SIZES[1]] or effort.sizes[-1:]
    shares = []
    for size in sizes:
        taken = seconds(size)
        compute = Compute.of(wire, max(_LEAST_SECONDS, 2 * taken))
        start = begin(size) if dist.get_rank() in ranks else lambda: None
        _lost(wire, compute, start)  # to warm up
        for _ in range(effort.repeats):
            share = _lost(wire, compute, start) / taken
            shares.append(float(np.mean([wire.broadcast([share], rank)[0] for rank in ranks])))
    return min(1.0, max(0.0, float(np.median(shares))))


def _lost(wire: Wire, compute: Compute, begin: Callable[[], Wait | None]) -> float:
    """Seconds added to a step, compared with steps alone before and after."""
    wire.broadcast([0.0], 0)
    before = compute.seconds(lambda: None)
    wire.broadcast([0.0], 0)
    during = compute.seconds(begin)
    wire.broadcast([0.0], 0)
    after = compute.seconds(lambda: None)
    return during - (before + after) / 2

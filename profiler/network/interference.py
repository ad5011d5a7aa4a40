"""What messages and sums take from the compute beside which they pass.

gloo adds up and copies on the processor, maybe on the very core that a rank computes on; NCCL takes
some of the GPU. Each rank does steps of compute, and the same steps while in each of them a message
or a sum is begun, as pd-train does it, and waited for some steps later. What the steps take longer
is compute lost.
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
_LATER = 2  # steps: long enough for ranks that are not quite at the same step
_LEAST_SECONDS = 2e-3
_SIZES = (250e3, 16e6)
"""Bytes: what activations and buckets of gradients are like."""


@dataclass(frozen=True)
class Compute:
    """Steps of matrix products, each of about so many seconds."""

    wire: Wire
    products: int

    @staticmethod
    def of(wire: Wire, seconds: float) -> Compute:
        """All ranks take the number of products that rank 0 finds."""
        probe = Compute(wire, 16)
        probe.seconds(lambda: None)
        each = probe.seconds(lambda: None) / 16
        (told,) = wire.broadcast([max(1.0, round(seconds / each))], 0)
        return Compute(wire, int(told))

    def seconds(self, begin: Callable[[], Wait | None]) -> float:
        """Of one step, with what is begun in each of them; the mean of some."""
        left = torch.ones(_WIDTH, _WIDTH, device=self.wire.device) / _WIDTH
        right = left.clone()
        under_way: deque[Wait] = deque()
        self.wire.synchronize()
        start = time.perf_counter()
        for _ in range(_STEPS):
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
    """The share of the time of a message, from 0 to 1, that the ranks at its ends do not compute.

    Called by all ranks, all of which compute: on the same machine they take each other's cores.
    `seconds` that a message of so many bytes takes; `begin(bytes)` gives what begins one on this
    rank. The median over sizes and repeats of the mean over the ranks.
    """
    sizes = [size for size in effort.sizes if _SIZES[0] <= size <= _SIZES[1]] or effort.sizes[-1:]
    found = []
    for size in sizes:
        taken = seconds(size)
        compute = Compute.of(wire, max(_LEAST_SECONDS, 2 * taken))
        start = begin(size) if dist.get_rank() in ranks else lambda: None
        _lost(wire, compute, start)  # to warm up
        for _ in range(effort.repeats):
            share = _lost(wire, compute, start) / taken
            found.append(float(np.mean([wire.broadcast([share], rank)[0] for rank in ranks])))
    return min(1.0, max(0.0, float(np.median(found))))


def _lost(wire: Wire, compute: Compute, begin: Callable[[], Wait | None]) -> float:
    """Seconds of a step that are not compute any more; before and after it the steps alone."""
    wire.broadcast([0.0], 0)
    before = compute.seconds(lambda: None)
    wire.broadcast([0.0], 0)
    during = compute.seconds(begin)
    wire.broadcast([0.0], 0)
    after = compute.seconds(lambda: None)
    return during - (before + after) / 2

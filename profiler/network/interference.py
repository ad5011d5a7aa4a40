"""The compute time lost to messages and all-reduces that run at the same time.

gloo copies and adds on the CPU, possibly on the core that a rank computes on; NCCL uses part of the
GPU. Each rank times steps of compute, then the same steps with messages or all-reduces started in
each. As in pd-train a message is waited for some steps later. Sums begin in the course of a step,
like the buckets of a backward pass, and are waited for at its end by all ranks: one that got less
of the cores than another keeps all of them waiting. The difference is lost compute time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from pipedream.graph.cluster import MOST_BUSY
from pipedream.profiler.network.levels import Ranks
from pipedream.profiler.network.options import Effort
from pipedream.profiler.network.wire import Wait, Wire
from pipedream.schedule.overlap import BUCKET_BYTES

Seconds: TypeAlias = Callable[[float], float]
"""Of a message or a sum of so many bytes alone."""
Begin: TypeAlias = Callable[[int], Callable[[], Wait | None]]
"""A function that begins one of so many bytes on this rank."""

_ROWS, _WIDTH, _WEIGHTS = 128, 1024, 16
"""A product of activations and weights, which are 64 MiB in all: more than caches hold. Like the
passes of training it loses what it had in them to a message.
"""
_STEPS = 8
_SETTLING = 2
_LEAST_SECONDS = 2e-3


@dataclass(frozen=True)
class Compute:
    """Steps of compute, of `parts` each of which multiplies `activations` by `products` of the
    `weights` in turn. At its end a step leaves no more than `later` messages under way.
    """

    wire: Wire
    activations: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    later: int
    products: int = 1
    parts: int = 1

    @staticmethod
    def on(wire: Wire, later: int) -> Compute:
        """Steps of one product."""
        shape = (_WEIGHTS, _WIDTH, _WIDTH)
        weights = torch.full(shape, 1 / _WIDTH, device=wire.device)
        return Compute(wire, torch.ones(_ROWS, _WIDTH, device=wire.device), weights.unbind(), later)

    def of(self, seconds: float) -> Compute:
        """Steps of about `seconds`; all ranks use the number of products that rank 0 measures."""
        probe = replace(self, products=_WEIGHTS)
        probe.seconds(lambda: None)
        each = probe.seconds(lambda: None) / _WEIGHTS
        (products,) = self.wire.broadcast([max(1.0, round(seconds / each))], 0)
        return replace(self, products=int(products))

    def seconds(self, begin: Callable[[], Wait | None]) -> float:
        """The mean seconds of a step, with a call of `begin` in each part.

        Timed once the first is waited for: from then on a step has the work of as many messages as
        begin in it, be it of those before it. Where cores are short a message takes several times
        as long beside compute as alone, and the last ones are not over when the clock is read.
        """
        under_way: deque[Wait] = deque()
        turns = cycle(self.weights)
        start = 0.0
        for step in range(_SETTLING + _STEPS):
            if step == _SETTLING:
                self.wire.synchronize()
                start = time.perf_counter()
            for _ in range(self.parts):
                done = begin()
                if done is not None:
                    under_way.append(done)
                for weights in islice(turns, self.products):
                    torch.mm(self.activations, weights)
            while len(under_way) > self.later:
                under_way.popleft()()
        self.wire.synchronize()
        taken = time.perf_counter() - start
        while under_way:
            under_way.popleft()()
        return taken / _STEPS


@dataclass(frozen=True)
class Traffic:
    """What goes between the ranks beside compute.

    `sizes`: from how many bytes to how many; `parts` of a step in each of which one begins;
    `later`: how many are not waited for yet at the end of a step.
    """

    seconds: Seconds
    begin: Begin
    sizes: tuple[float, float]
    parts: int
    later: int

    @staticmethod
    def messages(seconds: Seconds, begin: Begin) -> Traffic:
        """Of activations; ranks that pass messages are not always at the same step."""
        return Traffic(seconds, begin, (250e3, 16e6), 1, 2)

    @staticmethod
    def sums(seconds: Seconds, begin: Begin) -> Traffic:
        """Of gradients, a bucket each."""
        return Traffic(seconds, begin, (BUCKET_BYTES / 2, BUCKET_BYTES), 4, 0)


def busy(wire: Wire, ranks: Ranks, effort: Effort, traffic: Traffic) -> float:
    """The share of the traffic's time in which the ranks at its ends cannot compute; above 1 where
    it takes longer beside compute than alone.

    Called by all ranks, which all compute, since ranks of one machine compete for cores. The median
    over sizes and repeats of the mean over ranks.
    """
    least, most = traffic.sizes
    sizes = [size for size in effort.sizes if least <= size <= most] or effort.sizes[-1:]
    takes_part = dist.get_rank() in ranks
    shares, steps = [], Compute.on(wire, traffic.later)
    # Steps that wait for one another do so in both cases.
    together = traffic.begin(4) if takes_part and not traffic.later else lambda: None
    for size in sizes:
        taken = traffic.seconds(size)
        part = steps.of(max(_LEAST_SECONDS, 2 * taken))
        start = traffic.begin(size) if takes_part else lambda: None
        beside = partial(replace(part, parts=traffic.parts).seconds, start)
        alone = partial(replace(part, products=part.products * traffic.parts).seconds, together)
        _lost(wire, beside, alone)  # to warm up
        for _ in range(effort.repeats):
            share = _lost(wire, beside, alone) / (taken * traffic.parts)
            shares.append(float(np.mean([wire.broadcast([share], rank)[0] for rank in ranks])))
    return min(MOST_BUSY, max(0.0, float(np.median(shares))))


def _lost(wire: Wire, beside: Callable[[], float], alone: Callable[[], float]) -> float:
    """Seconds of a step with traffic, less those of one without before and after it."""
    seconds = []
    for steps in (alone, beside, alone):
        wire.broadcast([0.0], 0)
        seconds.append(steps())
    before, during, after = seconds
    return during - (before + after) / 2

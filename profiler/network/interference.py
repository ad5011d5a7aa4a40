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
from itertools import cycle
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipedream.capture.captured import flatten_inputs
from pipedream.capture.compute_settings import Precision
from pipedream.capture.export import capture
from pipedream.capture.sources.load import Loaded
from pipedream.graph.cluster import MOST_BUSY
from pipedream.profiler.network.levels import Ranks
from pipedream.profiler.network.options import Effort
from pipedream.profiler.network.wire import Wait, Wire
from pipedream.profiler.stretches.full_pass import passes
from pipedream.schedule.overlap import BUCKET_BYTES

Seconds: TypeAlias = Callable[[float], float]
"""Of a message or a sum of so many bytes alone."""
Begin: TypeAlias = Callable[[int], Callable[[], Wait | None]]
"""A function that begins one of so many bytes on this rank."""

_ROWS, _WIDTH, _WEIGHTS = 128, 1024, 16
"""A product of activations and weights, which are 64 MiB in all: more than caches hold. Like the
passes of training it loses what it had in them to a message.
"""
_STEPS, _FEWEST_STEPS = 8, 2
_STEPS_SECONDS = 3.0
"""Of those that are timed together: of the passes of a large model there are fewer."""
_SETTLING = 2
_LEAST_SECONDS = 2e-3
_MOST_SECONDS = 30.0
"""Of all repeats for one size, if two repeats take no longer."""


@dataclass(frozen=True)
class Work:
    """Compute that messages and sums go beside.

    `run` does it once, and calls its argument `places` times meanwhile: where some may begin.
    `gradient_bytes`: what a run has to add up, or None.
    """

    run: Callable[[Callable[[], None]], None]
    places: int
    gradient_bytes: int | None = None

    @staticmethod
    def product(device: torch.device) -> Work:
        """Makes work of one product, of the next of several weights."""
        weights = torch.full((_WEIGHTS, _WIDTH, _WIDTH), 1 / _WIDTH, device=device).unbind()
        activations, turns = torch.ones(_ROWS, _WIDTH, device=device), cycle(weights)

        def run(reached: Callable[[], None]) -> None:
            reached()
            torch.mm(activations, next(turns))

        return Work(run, places=1)

    @staticmethod
    def of_model(loaded: Loaded, device: torch.device) -> Work:
        """Makes work of forward and backward passes; places are where a gradient is there, as in a
        run. Raises UserError if the model cannot be captured.

        What a sum takes from a pass depends on the pass: one whose data a cache holds loses more to
        what gloo copies and adds up than one that reads everything from memory anyway.
        """
        precision = Precision(loaded.autocast, device)
        captured = capture(loaded.model, loaded.args, loaded.kwargs, precision=precision)
        once = passes(captured, flatten_inputs(loaded.args, loaded.kwargs), device)
        learned = [each for each in captured.module.parameters() if each.requires_grad]
        listening: list[Callable[[], None]] = []

        def arrived(_: Tensor) -> None:
            for reached in listening:
                reached()

        for parameter in learned:
            parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

        def run(reached: Callable[[], None]) -> None:
            reached()
            listening[:] = [reached]
            with precision.computing():
                once()

        return Work(run, places=1 + len(learned), gradient_bytes=sum(p.nbytes for p in learned))


@dataclass(frozen=True)
class Steps:
    """Steps of compute, each of so many `runs` of the work, in each of which `parts` messages or
    sums begin. At its end a step leaves no more than `later` of them under way. `count` steps are
    timed together.
    """

    wire: Wire
    work: Work
    later: int
    runs: int = 1
    parts: int = 1
    count: int = _STEPS

    def of(self, parts: int, seconds: float, size: float) -> Steps:
        """Returns steps of so many `parts` of about `seconds` each. A run that takes longer is a
        step of as many parts as it has time for, and gradients to fill `size` bytes each.

        All ranks do what rank 0 finds.
        """
        of_model = self.work.gradient_bytes is not None
        probe = replace(self, count=_FEWEST_STEPS) if of_model else replace(self, runs=_WEIGHTS)
        probe.seconds(lambda: None)
        run_seconds = probe.seconds(lambda: None) / probe.runs
        if run_seconds > parts * seconds and self.work.gradient_bytes is not None:
            parts = max(1, min(int(run_seconds / seconds), int(self.work.gradient_bytes / size)))
        fewest = -(-parts // self.work.places)
        runs = max(fewest, round(parts * seconds / run_seconds))
        count = min(_STEPS, max(_FEWEST_STEPS, int(_STEPS_SECONDS / (runs * run_seconds))))
        parts, runs, count = map(int, self.wire.broadcast([parts, runs, count], 0))
        return replace(self, parts=parts, runs=runs, count=count)

    def seconds(self, begin: Callable[[], Wait | None]) -> float:
        """Returns the mean seconds of a step, with a call of `begin` in each part.

        Timed once the first is waited for: from then on a step has the work of as many messages as
        begin in it, be it of those before it. Where cores are short a message takes several times
        as long beside compute as alone, and the last ones are not over when the clock is read.
        """
        under_way: deque[Wait] = deque()
        start = 0.0
        for step in range(_SETTLING + self.count):
            if step == _SETTLING:
                self.wire.synchronize()
                start = time.perf_counter()
            self.step(begin, under_way)
            while len(under_way) > self.later:
                under_way.popleft()()
        self.wire.synchronize()
        taken = time.perf_counter() - start
        while under_way:
            under_way.popleft()()
        return taken / self.count

    def step(self, begin: Callable[[], Wait | None], under_way: deque[Wait]) -> None:
        """Runs one step, with a call of `begin` in each part; `under_way` gets what began."""
        reached = begun = 0

        def place() -> None:
            nonlocal reached, begun
            if reached * self.parts >= begun * self.runs * self.work.places:
                begun += 1
                done = begin()
                if done is not None:
                    under_way.append(done)
            reached += 1

        for _ in range(self.runs):
            self.work.run(place)


@dataclass(frozen=True)
class Traffic:
    """Describes what goes between the ranks beside compute.

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
        """Makes the traffic of activations, between ranks that may be at different steps."""
        return Traffic(seconds, begin, (250e3, 16e6), 1, 2)

    @staticmethod
    def sums(seconds: Seconds, begin: Begin) -> Traffic:
        """Makes the traffic of gradients, a bucket each."""
        return Traffic(seconds, begin, (BUCKET_BYTES / 2, BUCKET_BYTES), 4, 0)


def busy(wire: Wire, ranks: Ranks, effort: Effort, traffic: Traffic, work: Work) -> float:
    """Returns the share of the traffic's time in which the ranks at its ends cannot compute; above
    1 where it takes longer beside compute than alone.

    Called by all ranks, which all compute, since ranks of one machine compete for cores. The median
    over sizes and repeats of the mean over ranks.
    """
    least, most = traffic.sizes
    sizes = [size for size in effort.sizes if least <= size <= most] or effort.sizes[-1:]
    takes_part = dist.get_rank() in ranks
    shares, steps = [], Steps(wire, work, traffic.later)
    # Steps that wait for one another do so in both cases.
    together = traffic.begin(4) if takes_part and not traffic.later else lambda: None
    for size in sizes:
        taken = traffic.seconds(size)
        both = steps.of(traffic.parts, max(_LEAST_SECONDS, 2 * taken), size)
        start = traffic.begin(size) if takes_part else lambda: None
        beside = partial(both.seconds, start)
        alone = partial(replace(both, parts=1).seconds, together)
        begun = time.perf_counter()
        _lost(wire, beside, alone)  # to warm up
        (each,) = wire.broadcast([time.perf_counter() - begun], 0)
        for _ in range(min(effort.repeats, max(2, int(_MOST_SECONDS / each)))):
            share = _lost(wire, beside, alone) / (taken * both.parts)
            shares.append(float(np.mean([wire.broadcast([share], rank)[0] for rank in ranks])))
    return min(MOST_BUSY, max(0.0, float(np.median(shares))))


def _lost(wire: Wire, beside: Callable[[], float], alone: Callable[[], float]) -> float:
    """Returns the seconds of a step with traffic, less those of one without before and after it."""
    seconds = []
    for steps in (alone, beside, alone):
        wire.broadcast([0.0], 0)
        seconds.append(steps())
    before, during, after = seconds
    return during - (before + after) / 2

"""How long to warm up and how often to repeat a measurement."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from pipedream.graph.profile import Quartiles

_Turn = TypeVar("_Turn")

_STABLE = 0.03
_MOST_WARMUP, _WARMUP_SECONDS = 10, 10.0
_PRECISION = 0.01
_FEWEST, _MOST = 4, 200
_LEAST_SECONDS = 8.0


_GROWN = 2.0
"""So many times the least: a repeat for which the heap grew."""


def counting(seconds: Sequence[float]) -> list[float]:
    """Returns those that count: not of repeats for which the heap grew. Memory that no process has
    had yet may come page by page from the machine below: of a virtual one a second for 400 MB.
    """
    least = min(seconds, default=0.0)
    return [each for each in seconds if each <= _GROWN * least]


@dataclass(frozen=True)
class StoppingRule:
    """The passes of the warm-up and the repeats after it; None to decide while measuring.

    Warm-up then ends when a pass is less than `_STABLE` faster than the one before, or after two
    passes and `_WARMUP_SECONDS`. Repeats end when the median is known within `_PRECISION`, or after
    `seconds` or `most`; there are at least `_FEWEST`, over at least `_LEAST_SECONDS`.
    """

    warmup: int | None = None
    repeats: int | None = None
    seconds: float = 30.0
    most: int = _MOST


@dataclass
class Repeats:
    """Counts warm-up and repeats of one measurement; `noted` has the seconds of each repeat."""

    stopping_rule: StoppingRule
    noted: list[float] = field(default_factory=list)
    warming: list[float] = field(default_factory=list)
    began: float = 0.0

    def run(
        self,
        once: Callable[[], _Turn],
        seconds: Callable[[_Turn], float],
        progress: Callable[[float], None] = lambda part: None,
    ) -> list[_Turn]:
        """Calls `once` for the warm-up, then for each repeat, and returns what the repeats gave.

        `seconds` says how long one took; `progress` is called with the fraction done.
        """
        while self.warm(seconds(once())):
            pass
        turns: list[_Turn] = []
        more = True
        while more:
            turns.append(once())
            more = self.go_on(seconds(turns[-1]))
            progress(self.part)
        return turns

    def warm(self, seconds: float) -> bool:
        """Records a pass of the warm-up; returns whether another is needed."""
        self.warming.append(seconds)
        if self.stopping_rule.warmup is not None:
            return len(self.warming) < self.stopping_rule.warmup
        *before, last = self.warming
        unstable = not before or last < before[-1] * (1 - _STABLE)
        within_limit = len(before) < 1 or sum(self.warming) < _WARMUP_SECONDS
        return unstable and within_limit and len(self.warming) < _MOST_WARMUP

    def go_on(self, seconds: float) -> bool:
        """Records a repeat; returns whether another is needed."""
        now = time.monotonic()
        self.began = self.began or now - seconds
        self.noted.append(seconds)
        count = len(self.noted)
        if self.stopping_rule.repeats is not None:
            return count < self.stopping_rule.repeats
        taken = now - self.began
        if count < _FEWEST:
            return True
        if count >= self.stopping_rule.most or taken >= self.stopping_rule.seconds:
            return False
        return taken < _LEAST_SECONDS or not self._precise

    @property
    def _precise(self) -> bool:
        """Tells whether the 95 % confidence interval of the median is within `_PRECISION`.

        The notch of a box plot: 1.57 interquartile ranges over the square root of the repeats
        (McGill, Tukey and Larsen, 1978).
        """
        spread = Quartiles.of(self.noted)
        off = 1.57 * (spread.upper - spread.lower) / len(self.noted) ** 0.5
        return bool(off <= _PRECISION * spread.median)

    @property
    def part(self) -> float:
        """Returns the fraction done, from 0 to 1."""
        if self.stopping_rule.repeats is not None:
            return len(self.noted) / self.stopping_rule.repeats
        if not self.noted:
            return 0.0
        return min((time.monotonic() - self.began) / self.stopping_rule.seconds, 1.0)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disables garbage collection, like timeit: it would count in whichever node it interrupts.
    Where it is disabled there is nothing to collect first.
    """
    enabled = gc.isenabled()
    if enabled:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

"""How passes vary, of one worker and between several."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

_INTERRUPTED = 3.0
"""Passes longer than this multiple of the median are left out as interrupted."""

_FEWEST_TO_DIVIDE = 4
"""Of fewer passes nothing is said of how fast they vary."""

_MEDIAN_TO_MEAN = math.sqrt(math.pi / 2)
"""How much less a median is known than a mean, of a normal distribution."""

_LEVELS = 9
"""That stand for a normal distribution."""


@dataclass(frozen=True)
class PassVariation:
    """How passes that follow each other vary, divided in two.

    `fast`: equally likely times of a pass as multiples of the median, of what changes from one pass
    to the next: each worker has its own, so that others wait. Their mean is that of all passes.
    `drift`: the relative standard deviation of what remains, and changes slowly. `own`: that of the
    part of the drift which each worker has by itself, so that others wait too; the rest is common
    to all workers of a machine. `of_median`: that of the median of the passes.
    """

    fast: tuple[float, ...]
    drift: float
    of_median: float
    own: float = 0.0

    @staticmethod
    def of(seconds: Sequence[float], beside: Sequence[Sequence[float]] = ()) -> PassVariation:
        """Divides the variance of the logarithms as von Neumann did (The mean square successive
        difference, 1941): neighbours differ by sqrt(2) of the fast deviation, and hardly by drift.

        `seconds`: of one pass or more, in order; those that were interrupted are left out.
        `beside`: for each other worker, what its passes took at the time of each of those. What two
        workers have in common is not in the ratio of their times, and twice what each has by
        itself. Without any, all drift is common.
        """
        median = statistics.median(seconds)
        kept = [each / median for each in seconds if each < _INTERRUPTED * median]
        if len(kept) < _FEWEST_TO_DIVIDE:
            return PassVariation(tuple(kept), 0.0, 0.0)
        steps, fast, slow = _divided([math.log(each) for each in kept])
        factors = [math.exp(step) for step in steps]
        level = statistics.fmean(kept) / statistics.fmean(factors)
        apart = [_apart(seconds, other) for other in beside]
        return PassVariation(
            tuple(level * factor for factor in factors),
            slow,
            _MEDIAN_TO_MEAN * math.sqrt(fast / len(kept)),
            min(slow, math.sqrt(statistics.fmean(apart))) if apart else 0.0,
        )


def _divided(logs: Sequence[float]) -> tuple[list[float], float, float]:
    """Returns what changes from each pass to the next, its variance, and the deviation of drift."""
    steps = [(after - before) / math.sqrt(2) for before, after in pairwise(logs)]
    fast = math.fsum(step**2 for step in steps) / len(steps)
    return steps, fast, math.sqrt(max(0.0, statistics.variance(logs) - fast))


def _apart(seconds: Sequence[float], other: Sequence[float]) -> float:
    """Returns the variance of the drift that one of two workers has by itself."""
    own_most = _INTERRUPTED * statistics.median(seconds)
    others_most = _INTERRUPTED * statistics.median(other)
    ratios = [
        math.log(one / two)
        for one, two in zip(seconds, other, strict=True)
        if one < own_most and two < others_most
    ]
    return _divided(ratios)[2] ** 2 / 2 if len(ratios) >= _FEWEST_TO_DIVIDE else 0.0


@cache
def levels(deviation: float, count: int = _LEVELS) -> tuple[float, ...]:
    """Returns equally likely factors around 1, their mean, whose logarithms are as good as normal
    and deviate so much.
    """
    if count == 1 or not deviation:
        return (1.0,) * count
    normal = statistics.NormalDist()
    steps = [normal.inv_cdf((number + 0.5) / count) for number in range(count)]
    unit = deviation / math.sqrt(math.fsum(step**2 for step in steps) / count)
    factors = [math.exp(unit * step) for step in steps]
    mean = statistics.fmean(factors)
    return tuple(factor / mean for factor in factors)


def in_all(spread: Sequence[float], own: float) -> tuple[float, ...]:
    """Returns equally likely times of a pass, with the drift of one worker; nothing for nothing."""
    if not own:
        return tuple(spread)
    return tuple(time * level for time in spread for level in levels(own))

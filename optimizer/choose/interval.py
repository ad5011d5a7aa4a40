"""The interval that nine of ten runs fall into.

A run differs from what is expected of it by factors that have little to do with each other: their
variances, of logarithms, add up.

- The machine is faster or slower than when it was profiled. `FLOOR` of that is always there; where
  the profile itself has drifted, or its median is of few passes, more.
- Workers wait for the slowest pass, if each worker's passes vary by themselves. Those of one
  machine have some of that in common, and its caches and cores may add to it: between no waiting
  and twice as much is taken to be equally likely.
- A time that is estimated is off by as much as such estimates were.

Several profiles say more of the first (`Uncertainty.others`). A profile and a run are draws x_j of
how slow the machine is, of a variance V of which FLOOR and drift say what is to be expected: as
much as `_PRIOR` further profiles would. With k profiles

    V = (_PRIOR v + sum_j (x_j - mean)^2) / (_PRIOR + k - 1),   v = (FLOOR^2 + drift^2) / 2

is the mean of the scaled inverse chi-squared distribution that Bayes' rule gives, up to a constant
(Gelman et al., Bayesian Data Analysis, section 2.6), and V (1 + 1/k) the variance of a run from the
mean of the profiles: with one it is FLOOR^2 + drift^2.
"""

from __future__ import annotations

import math
from statistics import fmean

from pipedream.graph.profile import Uncertainty

FLOOR = 0.04
"""Standard deviation of ln(measured / expected) where the profile shows no drift: of twelve runs on
a shared machine about their mean (docs/explanation/profiler.md, "How near it comes").
`scripts/bench/pairs/pairs.py` measures it."""

_NINE_OF_TEN = 1.645
"""Standard deviations of a normal distribution between which and their negative nine tenths lie."""

_PRIOR = 4


def interval(seconds: float, waiting: float, uncertainty: Uncertainty) -> tuple[float, float]:
    """Returns between which seconds nine of ten runs take that are expected to take `seconds`, of
    which workers wait for the slowest for `waiting`.
    """
    of_waiting = max(0.0, waiting) / seconds / math.sqrt(3) if seconds else 0.0
    deviation = math.hypot(_of_machine(uncertainty), of_waiting, uncertainty.estimated)
    factor = math.exp(_NINE_OF_TEN * deviation)
    return seconds / factor, seconds * factor


def _of_machine(uncertainty: Uncertainty) -> float:
    """Returns the relative deviation of a run's passes from the mean of the profiles."""
    alone = FLOOR**2 + uncertainty.drift**2 + uncertainty.of_median**2
    levels = (0.0, *uncertainty.others)
    middle = fmean(levels)
    apart = math.fsum((level - middle) ** 2 for level in levels)
    variance = (_PRIOR * alone / 2 + apart) / (_PRIOR + len(levels) - 1)
    return math.sqrt(variance * (1 + 1 / len(levels)))

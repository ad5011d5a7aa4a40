"""Fits the sums over nodes to times of stretches, which differ by calls, caches and marks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import lsq_linear

_STRETCH_OFF, _CLOCK_OFF, _FACTOR_OFF, _CALL_OFF = 0.03, 2e-5, 0.1, 3e-4
_LEAST_FACTOR = 0.5


@dataclass(frozen=True)
class Compared:
    """Seconds of one stretch of nodes: the sum over its nodes, and measured as a whole.

    `off`: the uncertainty of their difference, from its spread over the repeats.
    """

    summed: float
    measured: float
    off: float = 0.0

    @staticmethod
    def median(each: Sequence[Compared]) -> Compared:
        """The median over the repeats; the uncertainty of a single repeat is a tenth.

        Takes the median of the ratio within each repeat. On a machine whose speed changes, the
        medians of sums and of measurements may come from moments of different speed.
        """
        summed = statistics.median(one.summed for one in each)
        times = [one.measured / one.summed for one in each if one.summed > 0]
        if not times:
            return Compared(summed, statistics.median(one.measured for one in each))
        off = 0.1
        if len(times) > 1:
            lower, _, upper = statistics.quantiles(times, n=4, method="inclusive")
            off = (upper - lower) / len(times) ** 0.5
        return Compared(summed, summed * statistics.median(times), off * summed)


@dataclass(frozen=True)
class StretchFit:
    """A stretch takes `call` seconds plus `factor` times the sum over its nodes.

    `errors`: the remaining error of each stretch, relative to its measured time.
    """

    call: float = 0.0
    factor: float = 1.0
    errors: tuple[float, ...] = ()

    @staticmethod
    def of(compared: Sequence[Compared]) -> StretchFit:
        """The maximum a posteriori fit under normal errors, with call >= 0 and factor >= 0.5.

        Standard deviations: of a stretch 3 % of its measured time, 20 us and `Compared.off`; of the
        factor 0.1 around 1; of the call 0.3 ms around 0. So passes of milliseconds determine the
        call, while in passes of seconds a slow moment of the machine is not mistaken for one.
        """
        pairs = [pair for pair in compared if pair.summed > 0 and pair.measured > 0]
        rows = [(1.0, pair.summed, pair.measured) for pair in pairs]
        rows += [(1.0, 0.0, 0.0), (0.0, 1.0, 1.0)]
        off = [math.hypot(_STRETCH_OFF * pair.measured, _CLOCK_OFF, pair.off) for pair in pairs]
        table = np.array(rows) / np.array([*off, _CALL_OFF, _FACTOR_OFF])[:, None]
        bounds = ([0.0, _LEAST_FACTOR], np.inf)
        call, factor = lsq_linear(table[:, :2], table[:, 2], bounds, method="bvls").x
        errors = ((call + factor * pair.summed) / pair.measured - 1 for pair in pairs)
        return StretchFit(float(call), float(factor), tuple(map(float, errors)))

    @property
    def typical(self) -> float:
        """The median of the absolute errors."""
        return statistics.median(map(abs, self.errors)) if self.errors else 0.0

    @property
    def worst(self) -> float:
        return max(map(abs, self.errors), default=0.0)

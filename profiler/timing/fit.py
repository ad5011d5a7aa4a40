"""What the times of single nodes miss of the time of a stretch of them: caches, calls, marks."""

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
    """Seconds of one stretch of nodes: the sum over its nodes, and as measured by itself.

    `off`: how far their difference may be off, for it was not the same in all repeats.
    """

    summed: float
    measured: float
    off: float = 0.0

    @staticmethod
    def median(each: Sequence[Compared]) -> Compared:
        """Over the repeats; a single one may be off by a tenth.

        What was measured counts as a multiple of the sum of the same repeat: on a machine that is
        fast and slow by turns the median of either may be that of a fast or of a slow moment.
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
    """A stretch takes `call` seconds and `factor` times the sum over its nodes.

    `errors`: what is left then, for each stretch as a part of what was measured.
    """

    call: float = 0.0
    factor: float = 1.0
    errors: tuple[float, ...] = ()

    @staticmethod
    def of(compared: Sequence[Compared]) -> StretchFit:
        """The likeliest, where chance has each of three things off by its own measure: a stretch by
        3 % of what was measured, 20 us and `Compared.off`, the factor by 0.1 from 1, the call by
        0.3 ms from 0.

        So in passes of milliseconds the measurements say what a call takes, and in those of seconds
        a busy moment of the machine does not pass for one. No call takes less than nothing, and no
        factor is less than a half.
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
        """The median of the errors, without signs."""
        return statistics.median(map(abs, self.errors)) if self.errors else 0.0

    @property
    def worst(self) -> float:
        return max(map(abs, self.errors), default=0.0)

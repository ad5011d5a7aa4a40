"""From the times of messages of several sizes to a link: a line, or the points themselves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from pipedream.graph.cluster import Link

MOST_MISS = 0.2
"""A line that is further off somewhere, by its share of what was measured, is not what is used."""

_FASTEST = 1e15  # bytes per second: where more bytes take no longer


@dataclass(frozen=True)
class LinkFit:
    """`line`: latency plus bytes over bandwidth. `miss`: the most that it is off at any size, as a
    share of the measured seconds. `link`: the line, or the points where it is too far off.
    """

    line: Link
    miss: float
    link: Link


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> LinkFit:
    """The line with the least sum of squared relative errors, neither number below zero.

    `sizes` in bytes, two or more, the smallest first; `seconds` that a message of each takes.
    """
    size, taken = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    rows = np.stack([1 / taken, size / taken], axis=1)
    scale = rows.max(axis=0)  # without it the columns differ by many powers of ten
    solution, _ = nnls(rows / scale, np.ones(len(taken)))
    latency, per_byte = (solution / scale).tolist()
    line = Link(latency=latency, bandwidth=min(_FASTEST, 1 / max(per_byte, 1 / _FASTEST)))
    miss = float(np.max(np.abs(line.seconds(size) - taken) / taken))
    points = tuple(zip(size.tolist(), never_falling(taken).tolist(), strict=True))
    return LinkFit(line, miss, line if miss <= MOST_MISS else Link(points=points))


def never_falling(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The times with none longer than a later one.

    What disturbs a measurement makes it longer: a larger message that was faster is believed.
    """
    return np.minimum.accumulate(seconds[::-1])[::-1]

"""Fits a link to the times of messages of several sizes: a line, or the points themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from pipedream.graph.cluster import Link

MOST_MISS = 0.2
"""The points are used instead of a line with a larger relative error than this at any size."""

_FASTEST = 1e15  # bytes per second, if more bytes take no longer


@dataclass(frozen=True)
class LinkFit:
    """`line`: latency plus bytes over bandwidth. `miss`: its largest relative error at any size.
    `link`: the line, or the points if that error is too large.
    """

    line: Link
    miss: float
    link: Link


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> LinkFit:
    """Fits the line with the least sum of squared relative errors and no negative coefficient.

    `sizes`: two or more, in bytes, ascending; `seconds`: the time of a message of each size.
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
    """Lowers each time to the least of the later ones, since disturbances only add time."""
    return np.minimum.accumulate(seconds[::-1])[::-1]

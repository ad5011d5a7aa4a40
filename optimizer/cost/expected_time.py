"""The expected time of a minibatch when the times of passes vary: workers wait for the slowest.

Neighbours, clocks and caches make one pass longer than the next. A round of replicas ends with the
last of them, and a pipeline goes as fast as the stage that is slowest at the time, so the mean over
a run is above the time of any single worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def in_a_run(
    times: Sequence[tuple[float, str]], replicas: Sequence[int], spread: Sequence[float]
) -> float | None:
    """Expected seconds per minibatch of stages, given as (median seconds, what limits them).

    None if `spread` is empty. Times that are limited by messages are assumed not to vary.
    """
    if not spread:
        return None
    seconds, limits = zip(*times, strict=True)
    workers = [0 if w == "boundary" else count for w, count in zip(limits, replicas, strict=True)]
    return expected_slowest(seconds, workers, spread)


def expected_slowest(
    seconds: Sequence[float], workers: Sequence[int], spread: Sequence[float]
) -> float:
    """The mean time of the slowest stage, with the times of workers varying independently.

    `seconds`: median of each stage; `workers`: how many of its workers vary, 0 for a constant time;
    `spread`: equally likely times as multiples of the median. E[max] is the integral of
    1 - P(all are faster).

    Replicas wait for the slowest in every minibatch. The minibatches in flight of a pipeline even
    this out a little, so the result is an upper bound, and close.
    """
    factors = np.sort(spread)
    times = np.sort(np.unique(np.concatenate([np.outer(seconds, factors).ravel(), seconds])))
    all_done = np.ones_like(times)
    for median, count in zip(seconds, workers, strict=True):
        if count:
            done = np.searchsorted(median * factors, times, side="right") / len(factors)
            all_done *= done**count
        else:
            all_done *= times >= median
    return float(times @ np.diff(all_done, prepend=0.0))

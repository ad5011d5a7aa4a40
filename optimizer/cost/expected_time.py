"""How long a minibatch takes where passes take now more, now less: workers wait for the slowest.

Devices are not steady: neighbours, clocks and caches make one pass longer than the next. A round of
replicas ends with the last of them, and a pipeline goes as fast as the stage that is slowest at the
time, so that the mean over a run is above the time of any worker by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def in_a_run(
    times: Sequence[tuple[float, str]], replicas: Sequence[int], spread: Sequence[float]
) -> float | None:
    """Of stages with their seconds and what sets these; None where the spread is not known.

    What messages set is taken to be steady.
    """
    if not spread:
        return None
    seconds, limits = zip(*times, strict=True)
    workers = [0 if w == "boundary" else count for w, count in zip(limits, replicas, strict=True)]
    return expected_slowest(seconds, workers, spread)


def expected_slowest(
    seconds: Sequence[float], workers: Sequence[int], spread: Sequence[float]
) -> float:
    """The mean of the slowest stage's time, each worker's being now more, now less, by itself.

    `seconds` of each stage in the median; `workers`: how many of it may be slow or fast;
    0 where its time is always the same. `spread`: passes as multiples of their median,
    one as likely as the other. It is the integral over what is left of 1 - P(all are faster).

    That all wait for the slowest in every minibatch is what replicas do. A pipeline has minibatches
    in flight to even it out, a few: it is near to that and not above it.
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

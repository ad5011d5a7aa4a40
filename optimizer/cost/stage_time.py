"""The ranks of nested stages, and their seconds per minibatch: each over all its levels, and all
together when the times of passes vary.

Neighbours, clocks and caches make one pass longer than the next. A round of replicas ends with the
last of them, and a pipeline goes as fast as the stage that is slowest at the time, so the mean over
a run is above the time of any single worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost.recomputation import Recomputed, compute_seconds
from pipedream.optimizer.cost.stage_cost import LevelShare, Replication
from pipedream.optimizer.cost.stages import NestedStage, Share


def ranks(stage: NestedStage, cluster: Cluster) -> tuple[int, ...]:
    """The devices of a stage, the same in each component of every level it is replicated over.

    The outermost level counts fastest. Minibatch b runs on the (b mod r)-th rank, so stages that
    share a machine's inner pipeline keep each minibatch inside that machine, as the cost model
    assumes, whatever their replica counts.
    """
    places = (share.components for share in stage.shares)
    return tuple(cluster.rank(place) for place in product(*places))


def stage_time(
    cost: Replication, stage: NestedStage, recompute: Recomputed = False
) -> tuple[float, str]:
    """Seconds per minibatch that this stage allows, all levels together, and what limits them.

    `cost` is that on the stage's worst device. The cost of a level only grows with the cost inside
    it, so the largest of these times over the stages of a plan is the plan's time.
    """
    graph, nodes = cost.cuts.graph, list(cost.cuts.nodes(stage.start, stage.end))
    update = float(graph.update_seconds[nodes].sum())
    work = compute_seconds(graph, nodes, recompute) + update
    seconds = (work + cost.cuts.stage_overhead(stage.start)[[stage.end]]) / cost.speed
    limit = "compute"
    for terms in cost.terms(seconds, map(_level_share, stage.shares)):
        here = cost.model.limit(terms)
        limit = limit if here == "compute" else here
        seconds = cost.model.seconds(terms)
    return float(seconds[0]), limit


def _level_share(share: Share) -> LevelShare:
    ends, replicas = slice(share.end, share.end + 1), np.array([share.replicas])
    return LevelShare(share.level, share.start, ends, replicas, share.first)


def data_parallel_time(cost: Replication, machines: Sequence[int]) -> float:
    """Seconds per minibatch with the whole model on every device; `cost` is on the worst one."""
    end = len(cost.cuts) - 1
    seconds = (cost.cuts.seconds[[end]] + cost.cuts.stage_overhead(0)[[end]]) / cost.speed
    shares = (
        LevelShare(level, 0, slice(end, end + 1), np.array([count]), True)
        for level, count in enumerate(machines, start=1)
    )
    return float(cost.price(seconds, shares)[0])


def in_a_run(
    times: Sequence[tuple[float, str]], devices: Sequence[int], spread: Sequence[float]
) -> float | None:
    """Expected seconds per minibatch of stages, given as (median seconds, what limits them), and
    how many devices each has.

    None if `spread` is empty. Times that are limited by messages are assumed not to vary.
    """
    if not spread:
        return None
    seconds, limits = zip(*times, strict=True)
    workers = [0 if w == "boundary" else count for w, count in zip(limits, devices, strict=True)]
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

"""Likely cuts: a few thousand downsets worth cutting at, if there are too many to list."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache

import numpy as np

from pipedream.optimizer.cuts.antichains import depth_first, fewest_bytes, growth
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.frontier import Bins
from pipedream.optimizer.cuts.planning_graph import Floats, Ints, PlanningGraph


@lru_cache(maxsize=8)
def prefixes(graph: PlanningGraph, limit: int) -> tuple[int, ...]:
    """About `limit` downsets, the empty one first and the whole graph last: prefixes of `orders`.

    A plan over these is valid, but a better one may cut elsewhere. If there are more than `limit`,
    the lightest is kept in each of `limit` equal shares of the compute time.
    """
    by_downset = dict(prefix for order in orders(graph) for prefix in _weigh(graph, order))
    if len(by_downset) > limit:
        seconds, live = np.array(list(by_downset.values())).T
        chosen = list(by_downset)
        by_downset = {
            chosen[index]: by_downset[chosen[index]] for index in _lightest(seconds, live, limit)
        }
    return in_order({0, (1 << len(graph)) - 1, *by_downset})


def _weigh(graph: PlanningGraph, order: Sequence[int]) -> Iterator[tuple[int, tuple[float, float]]]:
    """Every prefix of the order, with its compute seconds and the output bytes still to be read."""
    downset, seconds, live = 0, 0.0, 0.0
    for node in order:
        live += growth(graph, downset, node)
        seconds += graph.compute_seconds[node]
        downset |= 1 << node
        yield downset, (seconds, live)


def likely_downsets(graph: PlanningGraph, bins: Bins, limit: int) -> tuple[int, ...]:
    """`prefixes`, and twice as many of the lightest cuts, spread evenly over the compute time."""
    of_all = {downset for downset in bins.merged(2 * limit // 3).lightest if downset is not None}
    return in_order({*of_all, *prefixes(graph, max(1, limit - len(of_all)))})


def in_order(downsets: Collection[int]) -> tuple[int, ...]:
    """Sorts downsets: each after all that it contains."""
    return tuple(sorted(downsets, key=lambda downset: (downset.bit_count(), downset)))


def orders(graph: PlanningGraph) -> list[Sequence[int]]:
    """Topological orders: the file's, depth first, and that which keeps the fewest bytes alive."""
    return [range(len(graph)), depth_first(graph), fewest_bytes(graph)]


def lightest_states(cuts: Cuts, count: int, among: Ints | None = None) -> list[int]:
    """The states, in order, of the lightest cut in each of `count` equal shares of the compute
    time, and of both ends; `among`: those to choose from [default: all].
    """
    among = np.arange(1, len(cuts) - 1) if among is None else among
    inner = among[_lightest(cuts.seconds[among], cuts.bytes_across[among], count)]
    return [0, *sorted(inner.tolist()), len(cuts) - 1]


def _lightest(seconds: Floats, live: Floats, count: int) -> Ints:
    """The index of the least of `live` in each of `count` equal shares of `seconds`."""
    total = max(seconds.max(initial=0.0), 1e-300)
    share = np.minimum(np.floor(seconds / total * count), count - 1)
    by_bytes = np.lexsort((live, share))
    return by_bytes[np.flatnonzero(np.diff(share[by_bytes], prepend=-1))]

"""Where the downsets are too many to enumerate: a few thousand that are worth cutting at."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from operator import or_

import numpy as np

from pipedream.optimizer.cuts import Cuts
from pipedream.optimizer.frontier import Bins
from pipedream.optimizer.planning import PlanningGraph
from pipedream.optimizer.topological import depth_first, fewest_bytes


def prefixes(graph: PlanningGraph, limit: int) -> tuple[int, ...]:
    """Downsets (as AntichainDag's: the empty one first, the whole graph last), about `limit`.

    The prefixes of three topological orders (the file's, depth first, the one that keeps the fewest
    bytes alive). A plan over these is valid, but a better one may cut elsewhere. Where they are
    more than `limit`, the lightest is kept in each of as many equal shares of the compute time.
    """
    found = {0}
    for order in orders(graph):
        found.update(accumulate((1 << node for node in order), or_))
    downsets = _sorted(found)
    if len(downsets) <= limit + 1:
        return downsets
    return tuple(downsets[index] for index in lightest(Cuts(graph, downsets), limit))


def likely_cuts(graph: PlanningGraph, bins: Bins, limit: int) -> tuple[int, ...]:
    """`prefixes`, and twice as many of the lightest cuts of all, spread evenly over the compute."""
    lightest = {downset for downset in bins.merged(2 * limit // 3).lightest if downset is not None}
    return _sorted({*lightest, *prefixes(graph, max(1, limit - len(lightest)))})


def _sorted(downsets: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(downsets, key=lambda downset: (downset.bit_count(), downset)))


def orders(graph: PlanningGraph) -> list[list[int]]:
    """Topological orders: the file's, depth first, the one that keeps the fewest bytes alive."""
    return [list(range(len(graph))), depth_first(graph), fewest_bytes(graph)]


def lightest(cuts: Cuts, count: int) -> list[int]:
    """The cuts of fewest bytes in each of `count` equal shares of the compute time, and the ends.

    In the order of `cuts`, by their positions.
    """
    share = np.floor(cuts.seconds / cuts.seconds[-1] * count)
    share[0], share[-1] = -1, count + 1
    by_bytes = np.lexsort((cuts.bytes_across, share))
    return sorted(by_bytes[np.flatnonzero(np.diff(share[by_bytes], prepend=-2))].tolist())

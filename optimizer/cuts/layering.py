"""Groups operators into layers, so that there are fewer cuts to search (Alpa, OSDI 2022, section
5.2).

For K operators in topological order, G(k, r) is the most that any layer receives, minimized over
all ways to group the first k operators into r layers:

    G(k, r) = min over i of max(G(i, r - 1), bytes that operators i+1 .. k read from 1 .. i)

where no layer of several operators computes longer than (1 + spread) times the mean. Ties go to
the least variance in compute time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from pipedream.optimizer.cuts.likely_cuts import in_order
from pipedream.optimizer.cuts.planning_graph import Floats, PlanningGraph

SPREAD = 0.5


def layers(graph: PlanningGraph, order: Sequence[int], count: int) -> tuple[int, ...]:
    """The ends of the layers: ends[r] of the operators in `order` are in the first r + 1 layers.

    `order` is topological; `count` is capped at the number of operators. If no layers keep to the
    spread, it is enlarged until some do.
    """
    count = min(count, len(order))
    seconds = np.concatenate([[0.0], np.cumsum(graph.compute_seconds[list(order)])])
    spread = SPREAD
    while True:
        cap = (1 + spread) * seconds[-1] / count
        first = _first_begins(seconds, cap)
        received = _received(graph, order, first)
        least = _chain(received, first, count, None, seconds)[0]
        if least < inf:
            return _chain(received, first, count, least, seconds)[1]
        spread = 2 * spread + 1


def _first_begins(seconds: Floats, cap: float) -> list[int]:
    """For each k, the first operator with which a layer of several that ends at k may begin."""
    begins = np.searchsorted(seconds, seconds - cap * (1 + 1e-12), side="left").tolist()
    return [0, *(min(begin, k - 1) for k, begin in enumerate(begins) if k)]


def _received(graph: PlanningGraph, order: Sequence[int], first: list[int]) -> list[Floats]:
    """received[k][i - first[k]]: bytes that operators i .. k-1 read from those before i, each
    tensor counted once.
    """
    place = {node: position for position, node in enumerate(order)}
    received = [np.zeros(1)]
    for k in range(1, len(order) + 1):
        low = first[k]
        row = np.zeros(k - low)
        row[:-1] = received[k - 1][low - first[k - 1] :] if low < k - 1 else 0.0
        for source in graph.producers[order[k - 1]]:
            readers = (place[node] for node in graph.consumers[source])
            before = max((at for at in readers if at < k - 1), default=place[source])
            # New for layers that begin after its previous reader, or else after its producer.
            row[max(before + 1 - low, 0) :] += graph.output_bytes[source]
        received.append(row)
    return received


def _chain(
    received: list[Floats], first: list[int], count: int, within: float | None, seconds: Floats
) -> tuple[float, tuple[int, ...]]:
    """The best `count` layers and their ends.

    Minimizes the bytes of the layer that receives most; or, with none above `within`, the sum of
    squares of their seconds, which for a fixed count minimizes the variance.
    """
    operators = len(received) - 1
    best = np.full((count + 1, operators + 1), inf)
    begin = np.zeros((count + 1, operators + 1), dtype=np.intp)
    best[0, 0] = 0.0
    for k in range(1, operators + 1):
        low = first[k]
        rows = best[:count, low:k]
        if within is None:
            totals = np.maximum(rows, received[k])
        else:
            squares = (seconds[k] - seconds[low:k]) ** 2
            totals = rows + np.where(received[k] <= within, squares, inf)
        choice = totals.argmin(axis=1)
        best[1:, k] = totals[np.arange(count), choice]
        begin[1:, k] = choice + low
    ends, k = [], operators
    for r in range(count, 0, -1):
        ends.append(k)
        k = int(begin[r, k])
    return float(best[count, operators]), tuple(reversed(ends))


def layer_downsets(
    graph: PlanningGraph, orders: Sequence[Sequence[int]], count: int
) -> tuple[int, ...]:
    """The downsets between the layers, `count` for each order, sorted as in `in_order`."""
    downsets = {0}
    for order in orders:
        downset, ends = 0, set(layers(graph, order, count))
        for position, node in enumerate(order, start=1):
            downset |= 1 << node
            if position in ends:
                downsets.add(downset)
    return in_order(downsets)

"""Divides a model into stretches, and fits the sums over their nodes to their times as a whole.

The two differ by calls, caches and marks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from scipy.optimize import lsq_linear

from pipedream.graph.model import Graph
from pipedream.graph.profile import DirectionFit

_REACH = 0.25
"""How far a cut may move to where fewer bytes cross, as a fraction of a stretch."""

_STRETCH_OFF, _CLOCK_OFF, _FACTOR_OFF, _CALL_OFF = 0.03, 2e-5, 0.1, 3e-4
_LEAST_FACTOR = 0.5


def stretches(
    graph: Graph, nodes: Sequence[str], seconds: Mapping[str, float], count: int
) -> list[Sequence[str]]:
    """Divides `nodes`, in topological order, into at most `count` stretches of about equal time.

    Stretches are consecutive and not empty. Each cut is where the fewest bytes cross near the
    place that divides the time evenly.
    """
    reached = [0.0]
    for name in nodes:
        reached.append(reached[-1] + seconds.get(name, 0.0))
    crossing = _crossing(graph, nodes)
    places: list[int] = []
    for part in range(1, count):
        even = reached[-1] * part / count
        reach = reached[-1] / count * _REACH
        near = [p for p in range(1, len(nodes)) if abs(reached[p] - even) <= reach]
        nearest = min(range(1, len(nodes)), key=lambda p: abs(reached[p] - even), default=0)
        places.append(min(near, key=lambda p: crossing[p], default=nearest))
    bounds = sorted({0, *places, len(nodes)})
    return [nodes[start:end] for start, end in pairwise(bounds)]


def _crossing(graph: Graph, nodes: Sequence[str]) -> list[float]:
    """Returns the bytes computed before and read after each place between nodes, and both ends."""
    position = {name: index for index, name in enumerate(nodes)}
    change = [0.0] * (len(nodes) + 1)
    for name, index in position.items():
        readers = [position[reader] for reader in graph.successors[name] if reader in position]
        if readers:
            change[index + 1] += graph.nodes[name].output_bytes
            change[max(readers) + 1] -= graph.nodes[name].output_bytes
    return list(accumulate(change))


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
        """Returns the median over the repeats; the uncertainty of a single repeat is a tenth.

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


def fit_stretches(compared: Sequence[Compared]) -> DirectionFit:
    """Fits a time of the call and a factor on the sum over the nodes to the measured times.

    The maximum a posteriori fit under normal errors, with call >= 0 and factor >= 0.5. Standard
    deviations: of a stretch 3 % of its measured time, 20 us and `Compared.off`; of the factor 0.1
    around 1; of the call 0.3 ms around 0. So passes of milliseconds determine the call, while in
    passes of seconds a slow moment of the machine is not mistaken for one.
    """
    pairs = [pair for pair in compared if pair.summed > 0 and pair.measured > 0]
    rows = [(1.0, pair.summed, pair.measured) for pair in pairs]
    rows += [(1.0, 0.0, 0.0), (0.0, 1.0, 1.0)]
    off = [math.hypot(_STRETCH_OFF * pair.measured, _CLOCK_OFF, pair.off) for pair in pairs]
    table = np.array(rows) / np.array([*off, _CALL_OFF, _FACTOR_OFF])[:, None]
    bounds = ([0.0, _LEAST_FACTOR], np.inf)
    call, factor = lsq_linear(table[:, :2], table[:, 2], bounds, method="bvls").x.tolist()
    errors = [abs((call + factor * pair.summed) / pair.measured - 1) for pair in pairs] or [0.0]
    return DirectionFit(
        call_seconds=call,
        factor=factor,
        typical_error=statistics.median(errors),
        worst_error=max(errors),
    )

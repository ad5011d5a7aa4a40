"""The part of an operator's work that a device does."""

from __future__ import annotations

from collections.abc import Sequence

from pipedream.graph.placements.operators import Operator
from pipedream.graph.placements.placement import Mesh, Shard
from pipedream.sharding.rules.strategy import Strategy


def work_share(operator: Operator, strategies: Sequence[Strategy], mesh: Mesh) -> float:
    """Returns the part of the whole operator's time that the slowest device takes: that of the
    elements along the dimension that each axis shards. What is partial is as large as the whole.
    """
    share = 1.0
    sizes: dict[tuple[int, int], int] = {}
    types = (*operator.inputs, *operator.outputs)
    for strategy, devices in zip(strategies, mesh, strict=True):
        ends = zip(types, (*strategy.inputs, *strategy.outputs), strict=True)
        sharded = (
            (number, type_, each)
            for number, (type_, each) in enumerate(ends)
            if type_ is not None and isinstance(each, Shard)
        )
        part = 1.0
        for number, type_, each in sharded:
            size = sizes.get((number, each.dim), type_.shape[each.dim])
            largest = each.chunks * -(-(size // each.chunks) // devices)
            sizes[number, each.dim] = largest
            part = largest / size
        share *= part
    return share

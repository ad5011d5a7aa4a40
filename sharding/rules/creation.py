"""Tensors of one number, made from a shape alone: each device makes its part."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pipedream.graph.placements.operators import Operator
from pipedream.graph.placements.placement import Shard
from pipedream.sharding.rules.strategy import Arguments, DivisionRule, R, Strategy


def rules() -> dict[str, DivisionRule]:
    """The number is that of the argument that is the shape."""
    table = dict.fromkeys(("empty", "full", "ones", "zeros"), 0)
    table |= dict.fromkeys(("new_empty", "new_full", "new_ones", "new_zeros"), 1)
    return {
        f"aten.{name}": DivisionRule(_shape, partial(_local_shape, position))
        for name, position in table.items()
    }


def _shape(operator: Operator, devices: int) -> Iterator[Strategy]:
    """A tensor that is given is read for its type alone."""
    for dim in range(len(operator.output.shape)):
        yield Strategy((R,) * len(operator.inputs), (Shard(dim),))


def _local_shape(position: int, whole: Operator, local: Operator) -> Arguments:
    return {position: local.output.shape}

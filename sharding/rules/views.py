"""The same elements in the same order under another shape; transposed; expanded.

A sharded dimension of a view is a flat sequence of elements that is cut in chunks, each of which
the devices divide: a dimension of size n, with `outer` elements in the dimensions before it and
`inner` in those after, in c chunks, is outer * c chunks of (n / c) * inner elements.
Two dimensions, one before and one after the view, hold the same elements if they have as many
chunks and the devices divide them at the same places. (b, s, 3hd) to (b, s, 3, h, d):

    S(2, chunks=3)    3bs chunks of hd elements
    S(3)              bs * 3 chunks of hd elements: each device has all of its heads, three times
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product

from pipedream.graph.placements.operators import Operator
from pipedream.graph.placements.placement import Shard
from pipedream.sharding.rules.indices import TermSum, broadcast, divisions, letters_of
from pipedream.sharding.rules.strategy import DivisionRule, P, Strategy, output_shape

_SIZED = ("view", "_unsafe_view", "reshape")
_SHAPE = partial(output_shape, 1)


def rules() -> dict[str, DivisionRule]:
    table = {name: DivisionRule(_view, _SHAPE, _allows) for name in _SIZED}
    table |= {name: DivisionRule(_view, allows=_allows) for name in ("squeeze", "unsqueeze")}
    table |= {
        name: DivisionRule(partial(_permutation, name)) for name in ("t", "transpose", "permute")
    }
    table |= {"expand": DivisionRule(_expand, _SHAPE)}
    return {f"aten.{name}": rule for name, rule in table.items()}


def _allows(operator: Operator, strategy: Strategy, devices: int) -> bool:
    (source,), (target,) = strategy.inputs, strategy.outputs
    if not isinstance(source, Shard) or not isinstance(target, Shard):
        return True
    size, other = operator.inputs[0].shape[source.dim], operator.output.shape[target.dim]
    return _alike(size, source.chunks, other, target.chunks, devices)


def _view(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Yields the pairs of dimensions with the same elements, with the fewest chunks."""
    before, after = operator.inputs[0].shape, operator.output.shape
    yield Strategy((P,), (P,))
    for (dim, size), (to, other) in product(enumerate(before), enumerate(after)):
        outer, outer_to = math.prod(before[:dim]), math.prod(after[:to])
        least = math.lcm(outer, outer_to)
        if min(size, other) < 2 or not least:
            continue
        chunks, chunks_to = least // outer, least // outer_to
        for number in range(1, size // chunks + 1):
            if _alike(size, chunks * number, other, chunks_to * number, devices):
                yield Strategy((Shard(dim, chunks * number),), (Shard(to, chunks_to * number),))
                break


def _alike(size: int, chunks: int, other: int, chunks_to: int, devices: int) -> bool:
    """Tells whether the devices divide the chunks of both dimensions at the same places."""
    if size % chunks or other % chunks_to:
        return False
    part, part_to = size // chunks, other // chunks_to
    return part == part_to or (part % devices == 0 and part_to % devices == 0)


def _permutation(name: str, operator: Operator, devices: int) -> Iterator[Strategy]:
    letters = letters_of(operator.inputs[0].shape)
    rank = len(letters)
    order = list(range(rank))
    if name == "permute":
        order = [dim % rank for dim in operator.integers(1)]
    elif rank > 1:
        one, other = (1, 2) if name == "transpose" else (0, 1)
        if name == "transpose":
            one, other = (operator.integer(k) % rank for k in (one, other))
        order[one], order[other] = order[other], order[one]
    yield from divisions([letters], [TermSum("".join(letters[d] for d in order), [[0]])], [0])


def _expand(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Each device repeats the elements along its part of a dimension."""
    letters = letters_of(operator.output.shape)
    input_letters = broadcast(operator.inputs[0].shape, operator.output.shape, letters)
    yield from divisions([input_letters], [TermSum(letters, [[0]])], [0])

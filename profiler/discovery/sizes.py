"""An operator with small tensors, which is divided in the same ways.

Equal sizes stay equal, multiples multiples, and products products, since operators such as views
and convolutions relate the sizes of their inputs, outputs and arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import count

from pipedream.graph.placements.operators import Argument, Operator, TensorType

_SMALL = 16
"""Sizes up to this one stay as they are."""
_LARGEST_FACTOR = 8
"""Up to so many times a size counts as a multiple of it."""
_STRIDE = 2
"""So many times even a size that stays as it is."""


OF_LARGE, OF_SMALL, ALL = (_SMALL, math.inf), (1, _SMALL), (1, math.inf)
"""Which sizes stay products: their larger factor is above the first number, up to the second.

Most products of sizes that stay as they are are so by chance: an image of 112 x 112 is 16 examples
by a window of 7. Where one is not, as 64 rows, which are 16 heads of 4 examples, what is a multiple
of that product may be: 1,024 tokens are 16 x 64.
"""


def with_small_sizes(operator: Operator, products: tuple[float, float] = ALL) -> Operator:
    """Returns the operator on small inputs; its outputs may be of other sizes than it says."""
    types = [each for each in (*operator.inputs, *operator.outputs) if each is not None]
    sizes = {size for type_ in types for size in type_.shape}
    known = _small_sizes(sizes, products)
    arguments = tuple(_with_sizes(each, known) for each in operator.arguments)
    keywords = tuple((name, _with_sizes(each, known)) for name, each in operator.keywords)
    return operator.model_copy(
        update={
            "arguments": arguments,
            "keywords": keywords,
            "inputs": tuple(_small_type(each, known) for each in operator.inputs),
            "outputs": tuple(each and _small_type(each, known) for each in operator.outputs),
        }
    )


def _small_sizes(sizes: Iterable[int], products: tuple[float, float]) -> dict[int, int]:
    """Returns the small size of each; different ones stay different."""
    known: dict[int, int] = {}
    fresh = count(_SMALL + 6, 4)  # halves are odd
    for size in sorted(sizes):
        small = size if size <= _SMALL else _from_others(size, known, products)
        while small is None or (small in known.values() and size > _SMALL):
            small = next(fresh)
        known[size] = small
    return known


def _from_others(size: int, known: Mapping[int, int], products: tuple[float, float]) -> int | None:
    """Returns the small size of a multiple, or of a product, of known ones."""
    for factor in range(2, _LARGEST_FACTOR + 1):
        base = size // factor
        if size % factor == 0 and base in known and (base > _SMALL or factor == _STRIDE):
            return factor * known[base]
    above, most = products
    for one in sorted(known, reverse=True):
        other = size // one if one and size % one == 0 else 0
        if other in known and 1 < other < one and above < one <= most:
            return known[one] * known[other]
    return None


def _small_type(type_: TensorType, known: Mapping[int, int]) -> TensorType:
    shape = tuple(known[size] for size in type_.shape)
    return type_.model_copy(update={"shape": shape, "order": ()})


def _with_sizes(argument: Argument, known: Mapping[int, int]) -> Argument:
    if isinstance(argument, tuple):
        return tuple(
            known.get(each, each) if isinstance(each, int) and not isinstance(each, bool) else each
            for each in argument
        )
    if isinstance(argument, int) and not isinstance(argument, bool):
        return known.get(argument, argument)
    return argument

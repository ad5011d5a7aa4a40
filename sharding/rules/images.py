"""Operators on images that treat each channel of each image alike: pooling, resizing, padding."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from pipedream.graph.placements.operators import Operator
from pipedream.sharding.rules.indices import TermSum, divisions, letters_of
from pipedream.sharding.rules.strategy import DivisionRule, Strategy, output_shape

_PADS = ("reflection_pad", "replication_pad")
_POOLS = ("avg_pool", "_adaptive_avg_pool")
_MAXIMA = ("max_pool{}d_with_indices", "adaptive_max_pool{}d")
_RESIZED = {
    "upsample_nearest1d": 1,
    "upsample_nearest2d": 2,
    "upsample_nearest3d": 3,
    "_upsample_nearest_exact2d": 2,
    "upsample_linear1d": 1,
    "upsample_bilinear2d": 2,
    "upsample_bicubic2d": 2,
    "upsample_trilinear3d": 3,
}


def rules() -> dict[str, DivisionRule]:
    """The backward passes are linear in the gradient, which comes first."""
    table = {"constant_pad_nd": DivisionRule(_padding)}
    for dims in (1, 2, 3):
        linear = _PADS if dims == 1 else (*_PADS, *_POOLS)  # pools of one dimension are of two
        for name in linear:
            table[f"{name}{dims}d"] = DivisionRule(partial(_planes, dims, [0]))
            table[f"{name}{dims}d_backward"] = DivisionRule(partial(_planes, dims, [0]))
        for name in _MAXIMA if dims > 1 else ():
            table[name.format(dims)] = DivisionRule(partial(_planes, dims, []))
            table[f"{name.format(dims)}_backward"] = DivisionRule(partial(_planes, dims, [0]))
    for name, dims in _RESIZED.items():
        table[name] = DivisionRule(partial(_planes, dims, [0]))
        table[f"{name}_backward"] = DivisionRule(
            partial(_planes, dims, [0]), partial(output_shape, 2)
        )
    return {f"aten.{name}": rule for name, rule in table.items()}


def _planes(
    dims: int, linear: Collection[int], operator: Operator, devices: int
) -> Iterator[Strategy]:
    """All tensors have the same dimensions before the last ones."""
    shape = operator.inputs[0].shape
    letters = letters_of(shape[: len(shape) - dims]) + "." * dims
    count = len(operator.inputs)
    yield from divisions(
        [letters] * count, [TermSum(letters, [range(count)])] * len(operator.outputs), linear
    )


def _padding(operator: Operator, devices: int) -> Iterator[Strategy]:
    """The last dimensions, from the back, have elements added before and after."""
    shape = operator.inputs[0].shape
    sizes = operator.integers(1)
    letters = list(letters_of(shape))
    for number, (before, after) in enumerate(zip(sizes[::2], sizes[1::2], strict=True), start=1):
        if before or after:
            letters[-number] = "."
    text = "".join(letters)
    zero = operator.argument(2, 0) == 0
    yield from divisions([text], [TermSum(text, [[0]])], [0] if zero else [])

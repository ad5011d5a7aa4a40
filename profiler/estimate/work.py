"""What an operator has to do, from the types of its inputs and outputs: flops and bytes. No torch.

`kind` and `sizes` say which measurements are like it (`roofline`): products of matrices by their
three sizes, whatever passes over memory by its bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pipedream.graph.placements.operators import Operator, TensorType, flops

VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "t", "transpose", "permute"),
        *("expand", "squeeze", "unsqueeze", "slice", "select", "split", "split_with_sizes"),
        *("unbind", "chunk", "narrow", "diagonal", "unfold", "as_strided", "alias", "detach"),
    )
)
"""Families whose result is the memory of their input."""
_PRODUCTS = {"aten.mm", "aten.addmm"}
_BATCHED = {"aten.bmm", "aten.baddbmm"}
_LOOKUPS = {"aten.embedding", "aten.index", "aten.gather", "aten.index_select"}
_NORMALIZATIONS = {
    f"aten.{name}{end}": f"batch norm{end.replace('_', ' ')}"
    for name in ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")
    for end in ("", "_backward")
}
"""Devices have operators of their own for the same."""
_ATTENTION = "aten._scaled_dot_product_"
_CAUSAL_AT = {
    "flash_attention_for_cpu": (4, 7),
    "flash_attention": (4, 11),
    "efficient_attention": (6, 11),
    "cudnn_attention": (6, 14),
}
"""At which argument kernels are told that a query sees the keys before it alone, forward and
backward.
"""
_ALIGNED = 8
_APART = 8.0
"""In octaves: so far from others of its sizes."""
FP8 = "float8_e4m3fn"
"""As device files call the type."""
_FP8_ALIGNED = 16
"""Kernels for fp8 take matrices whose sides are multiples of this (torch._scaled_mm)."""
_FLOATING = (FP8, "bfloat16", "float16", "float32", "float64")


class Work(NamedTuple):
    """What an operator has to do. `kind`: of measurements that are like it; `like`: the kind to
    turn to where a device has none. `sizes`: binary logarithms.
    """

    kind: str
    like: str
    dtype: str
    flops: float
    bytes: float
    sizes: tuple[float, ...]


def work_of(operator: Operator) -> Work | None:
    """Returns the work of an operator; None of one that does not touch memory."""
    family = operator.family
    moved = _moved(operator)
    if family in VIEWS or not moved:
        return None
    dtype, count = _dtype(operator), _flops(operator)
    if family in _PRODUCTS:
        sizes = (*_logs(*_product(operator)), _odd(*_product(operator)))
        return Work("product", "product", dtype, count, moved, sizes)
    if family in _BATCHED:
        batch = operator.inputs[-1].shape[0]
        sizes = (*_logs(*_product(operator)), _odd(*_product(operator)), math.log2(batch))
        return Work("batched product", "product", dtype, count, moved, sizes)
    if family.startswith("aten.convolution"):
        kind, sizes = _convolution(operator)
        return Work(kind, "product", dtype, count, moved, sizes)
    if "scaled_dot_product" in family:
        kind = "attention backward" if family.endswith("_backward") else "attention"
        query, key = _attended(operator)
        heads = math.prod(query.shape[:-2])
        sizes = _logs(heads, query.shape[-2], key.shape[-2], query.shape[-1])
        return Work(kind, "batched product", dtype, count, moved, sizes)
    if family in _NORMALIZATIONS:
        return Work(_NORMALIZATIONS[family], "pass", dtype, 0.0, moved, _logs(moved))
    if count:
        return Work(family, "product", dtype, count, moved, _logs(count))
    return Work(family, "pass", dtype, 0.0, moved, _logs(moved))


def product_work(rows: int, columns: int, length: int) -> Work:
    """Returns the work of a product of bfloat16 matrices, given its sizes and the sum's length."""
    sizes = rows, columns, length
    count = 2.0 * math.prod(sizes)
    moved = 2.0 * (rows * length + length * columns + rows * columns)
    return Work("product", "product", "bfloat16", count, moved, (*_logs(*sizes), _odd(*sizes)))


def in_fp8(operator: Operator, work: Work) -> bool:
    """Whether kernels can compute this product of bfloat16 matrices in fp8."""
    if work.kind != "product" or work.dtype != "bfloat16":
        return False
    return not any(size % _FP8_ALIGNED for size in _product(operator))


def _flops(operator: Operator) -> float:
    """Those that count: causal attention computes half of the scores, and a convolution's backward
    pass has one product for each gradient that is wanted.
    """
    count = flops(operator)
    if "scaled_dot_product" in operator.family:
        query, key = _attended(operator)
        name = operator.family.removeprefix(_ATTENTION).removesuffix("_backward")
        places = _CAUSAL_AT.get(name)
        if places is None or query.shape[-2] != key.shape[-2]:
            return count
        place = places[operator.family.endswith("_backward")]
        return count / 2 if operator.argument(place, False) is True else count
    if operator.family == "aten.convolution_backward":
        wanted = sum(each is not None for each in operator.outputs[:2])
        return count * wanted / 2
    return count


def _moved(operator: Operator) -> float:
    """Returns the bytes that are read and written. Of a table only the rows looked up."""
    written = sum(each.bytes for each in operator.outputs if each is not None)
    if operator.family in _LOOKUPS:
        return 2.0 * written
    return float(sum(each.bytes for each in operator.inputs) + written)


def _dtype(operator: Operator) -> str:
    """Returns the floating type of the largest input or output; of integers float32."""
    types = [*operator.inputs, *(each for each in operator.outputs if each is not None)]
    floating = [each for each in types if each.dtype in _FLOATING]
    return max(floating, key=lambda each: each.bytes).dtype if floating else "float32"


def _product(operator: Operator) -> tuple[int, int, int]:
    """Returns the rows, columns and the sum's length of a product of matrices."""
    left, right = operator.inputs[-2:]
    return left.shape[-2], right.shape[-1], right.shape[-2]


def _odd(*sizes: int) -> float:
    """Returns what sets products apart whose rows do not begin at multiples of eight elements, such
    as those of a vocabulary of 50,257: kernels of GPUs then take two or three times as long.
    """
    return _APART if any(size % _ALIGNED for size in sizes) else 0.0


def _attended(operator: Operator) -> tuple[TensorType, TensorType]:
    first = 1 if operator.family.endswith("_backward") else 0
    return operator.inputs[first], operator.inputs[first + 1]


def _convolution(operator: Operator) -> tuple[str, tuple[float, ...]]:
    """Returns the kind, and the sizes of the product that it comes to."""
    backward = operator.family.endswith("_backward")
    weight = operator.inputs[2 if backward else 1]
    first = operator.inputs[0] if backward else operator.output
    places = first.shape[0] * math.prod(first.shape[2:])
    groups = operator.arguments[9 if backward else 8]
    assert isinstance(groups, int), operator.target
    window = math.prod(weight.shape[2:])
    channels, depth = weight.shape[0] // groups, weight.shape[1]
    kind = "convolution" if groups == 1 else "grouped convolution"
    if backward:
        wanted = [each is not None for each in operator.outputs[:2]]
        kind += " backward" if all(wanted) else " input" if wanted[0] else " weight"
    return kind, _logs(places, channels, depth, window, *([groups] if groups > 1 else []))


def _logs(*sizes: float) -> tuple[float, ...]:
    return tuple(math.log2(max(size, 1)) for size in sizes)

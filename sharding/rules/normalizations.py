"""Layer, group and batch norm, and their backward passes.

In training the statistics of batch norm are those of the whole batch. Devices that divide its
channels have all that they need; devices that divide the batch, or the places in a picture, add up
two sums for each channel in the middle of the operator: forward those of the elements and then of
their squared deviations, backward those of the gradient and of its product with the input.

So there is no other graph for a divided batch: the operators stay what they are where nothing is
divided, and whoever plans and whoever runs read the same from the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from pipedream.graph.placements.operators import Operator, TensorType
from pipedream.graph.placements.placement import Placements, Shard
from pipedream.sharding.rules.indices import TermSum, divisions, letters_of
from pipedream.sharding.rules.strategy import Arguments, DivisionRule, P, R, Strategy, no_chunks

_BATCH_NORMS = {
    "native_batch_norm": 5,
    "cudnn_batch_norm": 5,
    "miopen_batch_norm": 5,
    "_native_batch_norm_legit": 5,
    "_native_batch_norm_legit_functional": 5,
    "_native_batch_norm_legit_no_training": None,
    "native_batch_norm_backward": 7,
}
"""The argument that says whether it trains: input, weight, bias and the running statistics come
before it. (`_native_batch_norm_legit.no_stats` has none, so it always does.)
"""


def rules() -> dict[str, DivisionRule]:
    table = {
        "native_layer_norm": DivisionRule(_layer_norm),
        "native_layer_norm_backward": DivisionRule(_layer_norm_backward),
        "native_group_norm": DivisionRule(_group_norm, partial(_group_sizes, 0, 3), no_chunks),
        "native_group_norm_backward": DivisionRule(
            _group_norm_backward, partial(_group_sizes, 1, 5), no_chunks
        ),
    }
    table |= {name: DivisionRule(_batch_norm) for name in _BATCH_NORMS}
    table |= {
        "native_batch_norm": DivisionRule(_divided_batch_norm, sums=_statistics),
        "native_batch_norm_backward": DivisionRule(_divided_batch_norm, sums=_gradient_sums),
    }
    return {f"aten.{name}": rule for name, rule in table.items()}


def _layer_norm(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Divides input, then perhaps weight and bias; output, mean, deviation."""
    data, statistics, weight = _layer_letters(operator, 0)
    inputs = [data] + [weight] * (len(operator.inputs) - 1)
    bias = operator.input_at(3)
    of_data = [number for number in range(len(inputs)) if number != bias]
    output = TermSum(data, [of_data] if bias is None else [of_data, [bias]])
    yield from divisions(inputs, [output, *(TermSum(statistics, [[0]]) for _ in range(2))])


def _layer_norm_backward(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Divides gradient, input, mean, deviation, weight, bias; three gradients."""
    data, statistics, weight = _layer_letters(operator, 1)
    inputs = [data, data, statistics, statistics] + [weight] * (len(operator.inputs) - 4)
    factor = operator.input_at(5)
    of_data = [0, 1, 2, 3] if factor is None else [0, 1, 2, 3, factor]
    outputs = [TermSum(data, [of_data]), TermSum(weight, [[0, 1, 2, 3]]), TermSum(weight, [[0]])]
    yield from divisions(inputs, outputs, [0])


def _layer_letters(operator: Operator, data_at: int) -> tuple[str, str, str]:
    """Returns the letters of data, statistics, and weight: a dot where it normalizes."""
    shape = operator.inputs[data_at].shape
    weight = "." * len(operator.integers(2 if data_at else 1))
    batch = letters_of(shape[: len(shape) - len(weight)])
    return batch + weight, batch + weight, weight


def _group_norm(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Divides input, then perhaps weight and bias; output, mean and deviation for each group."""
    data, statistics, weight = _group_letters(operator, 0, operator.integer(6), devices)
    inputs = [data] + [weight] * (len(operator.inputs) - 1)
    outputs = [TermSum(data, [range(len(inputs))]), *(TermSum(statistics, [[0]]) for _ in range(2))]
    yield from divisions(inputs, outputs)


def _group_norm_backward(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Divides gradient, input, mean, deviation, weight; gradients of input, weight and bias."""
    data, statistics, weight = _group_letters(operator, 1, operator.integer(8), devices)
    inputs = [data, data, statistics, statistics] + [weight] * (len(operator.inputs) - 4)
    of_weight = [TermSum(weight, [[0, 1, 2, 3]]), TermSum(weight, [[0]])]
    yield from divisions(inputs, [TermSum(data, [range(len(inputs))]), *of_weight], [0])


def _group_letters(
    operator: Operator, data_at: int, groups: int, devices: int
) -> tuple[str, str, str]:
    """Returns the letters of data, statistics and weight; devices have whole groups."""
    rank = len(operator.inputs[data_at].shape)
    g = "." if groups % devices else "g"
    return f"n{g}" + "." * (rank - 2), f"n{g}", g


def _group_sizes(data_at: int, first: int, whole: Operator, local: Operator) -> Arguments:
    """Returns batch, channels, elements of a channel, groups."""
    batch, channels = local.inputs[data_at].shape[:2]
    groups = whole.integer(first + 3) * channels // whole.integer(first + 1)
    return {first: batch, first + 1: channels, first + 3: groups}


def _batch_norm(operator: Operator, devices: int) -> Iterator[Strategy]:
    """All tensors have channels: those of one dimension have nothing else."""
    backward, training = operator.family.endswith("_backward"), _trains(operator)
    data = ("." if training else "n") + "c" + "." * (len(operator.inputs[0].shape) - 2)
    if len(data) < 2:
        return
    inputs = [_channel_letters(each, data) for each in operator.inputs]
    numbers = range(len(inputs))
    outputs = [
        TermSum(_channel_letters(each, data), [numbers if backward or not number else [0]])
        for number, each in enumerate(operator.outputs)
    ]
    if not training and not backward:  # the statistics that it gives are empty
        outputs[1:] = [TermSum(each.letters, []) for each in outputs[1:]]
    yield from divisions(inputs, outputs, [0] if backward else ())


def _divided_batch_norm(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Divides by channels, in training also all other dimensions, with sums of statistics."""
    for strategy in _batch_norm(operator, devices):
        by_channels = strategy.inputs[0] == Shard(1)
        yield replace(strategy, within=Shard(0)) if by_channels else strategy
    for dim in range(len(operator.inputs[0].shape)):
        if dim != 1 and _trains(operator):
            inputs, outputs = (_along(dim, each) for each in (operator.inputs, operator.outputs))
            yield Strategy(inputs, outputs, within=P)


def _along(dim: int, types: tuple[TensorType | None, ...]) -> Placements:
    """The data are divided; what there is for each channel is on all devices."""
    return tuple(Shard(dim) if each and len(each.shape) > 1 else R for each in types)


def _statistics(operator: Operator) -> tuple[TensorType, ...]:
    """Returns the types of each channel's sum, then of that of squared deviations."""
    return (_summed_type(operator.inputs[0], ()),) * 2


def _gradient_sums(operator: Operator) -> tuple[TensorType, ...]:
    """Returns the type of the gradients of each channel's weight and bias, summed at once."""
    return (_summed_type(operator.inputs[0], (2,)),)


def _summed_type(data: TensorType, shape: tuple[int, ...]) -> TensorType:
    """Returns the type of sums for each channel, which have single precision at least."""
    dtype, size = (data.dtype, 8) if data.dtype == "float64" else ("float32", 4)
    return TensorType(shape=(data.shape[1], *shape), dtype=dtype, element_bytes=size)


def elements_of_a_channel(operator: Operator) -> int:
    """Counts the elements of the data that have the same statistics in batch norm."""
    shape = operator.inputs[0].shape
    return math.prod(shape) // shape[1]


def _trains(operator: Operator) -> bool:
    position = _BATCH_NORMS[operator.family.removeprefix("aten.")]
    training = position is not None and bool(operator.argument(position))
    return training or operator.target.endswith("no_stats")


def _channel_letters(type_: TensorType | None, data: str) -> str:
    if type_ is None:
        return ""
    rank = len(type_.shape)
    return data if rank > 1 else "c" if rank and type_.shape[0] else "." * rank

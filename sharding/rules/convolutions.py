"""Convolutions, transposed ones and grouped ones among them, and their backward pass.

Groups of channels know nothing of each other, so devices divide the groups, and each has a
convolution of fewer groups. One group can be divided by its input or its output channels, but not
several groups. Positions are divided where a window is one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pipedream.graph.placements.operators import Operator
from pipedream.sharding.rules.indices import TermSum, divisions
from pipedream.sharding.rules.strategy import Arguments, DivisionRule, Strategy, no_chunks

_GROUPS = 8
"""The argument of a convolution, after input, weight, bias, stride, padding, dilation, transposed
and output padding; one later in the backward pass, which has the gradient before them.
"""


def rules() -> dict[str, DivisionRule]:
    return {
        "aten.convolution": DivisionRule(
            _convolution, partial(_local_groups, _GROUPS, 1), partial(_allows, _GROUPS)
        ),
        "aten.convolution_backward": DivisionRule(
            _backward, _local_sizes, partial(_allows, _GROUPS + 1)
        ),
    }


def _allows(groups_at: int, operator: Operator, strategy: Strategy, devices: int) -> bool:
    return operator.integer(groups_at) == 1 or no_chunks(operator, strategy, devices)


def _letters(
    operator: Operator, groups_at: int, devices: int, dims: int
) -> tuple[str, str, str, str]:
    """Returns the letters of input, weight, bias and output; g: whole groups on a device."""
    window, groups = "." * (dims - 2), operator.integer(groups_at)
    rest = "xyz"[: dims - 2] if _is_pointwise(operator, groups_at) else window
    if groups > 1:
        g = "." if groups % devices else "g"
        return f"n{g}{rest}", f"{g}.{window}", g, f"n{g}{rest}"
    weight = "co" if operator.argument(groups_at - 2) else "oc"
    return f"nc{rest}", f"{weight}{window}", "o", f"no{rest}"


def _is_pointwise(operator: Operator, groups_at: int) -> bool:
    """Tells whether each position of the output depends on the one of the input alone."""
    kernel = operator.inputs[groups_at - _GROUPS + 1].shape[2:]
    stride, padding = operator.integers(groups_at - 5), operator.integers(groups_at - 4)
    return {*kernel, *stride} == {1} and set(padding) == {0}


def _convolution(operator: Operator, devices: int) -> Iterator[Strategy]:
    dims = len(operator.inputs[1].shape)
    if len(operator.inputs[0].shape) != dims:
        return
    data, weight, bias, result = _letters(operator, _GROUPS, devices, dims)
    inputs, terms = [data, weight], [[0, 1]]
    if len(operator.inputs) == 3:
        inputs, terms = [*inputs, bias], [[0, 1], [2]]
    yield from divisions(inputs, [TermSum(result, terms)], range(len(inputs)))


def _backward(operator: Operator, devices: int) -> Iterator[Strategy]:
    dims = len(operator.inputs[2].shape)
    if len(operator.inputs[1].shape) != dims:
        return
    data, weight, bias, result = _letters(operator, _GROUPS + 1, devices, dims)
    outputs = [TermSum(data, [[0, 2]]), TermSum(weight, [[0, 1]]), TermSum(bias, [[0]])]
    yield from divisions([result, data, weight], outputs, range(3))


def _local_groups(groups_at: int, weight: int, whole: Operator, local: Operator) -> Arguments:
    """Returns a device's groups: of several, its share of the weight's first dimension."""
    groups = whole.integer(groups_at)
    if groups > 1:
        groups = groups * local.inputs[weight].shape[0] // whole.inputs[weight].shape[0]
    return {groups_at: groups}


def _local_sizes(whole: Operator, local: Operator) -> Arguments:
    """Returns groups and sizes; those of the bias are the channels of the gradient."""
    groups = _local_groups(_GROUPS + 1, 2, whole, local)
    return groups if whole.argument(3) is None else {**groups, 3: (local.inputs[0].shape[1],)}

"""Operators that compute each element of the output from the elements at its place, broadcast; or
from none: tensors of one number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from pipedream.graph.placements.operators import Input, Operator
from pipedream.graph.placements.placement import Shard
from pipedream.sharding.rules.indices import TermSum, broadcast, divisions, letters_of
from pipedream.sharding.rules.strategy import DivisionRule, R, Strategy, output_shape

_NONLINEAR = """
    abs acos acosh addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or
    bitwise_xor ceil celu clamp clamp_max clamp_min copysign cos cosh digamma elu eq erf
    erfc erfinv exp exp2 expm1 fill floor floor_divide fmax fmin fmod frac ge gelu gt
    hardshrink hardsigmoid hardswish hardtanh hypot isinf isfinite isnan le leaky_relu lerp lgamma
    log log10 log1p log2 log_sigmoid_forward logaddexp logical_and logical_not logical_or
    logical_xor logit lt maximum minimum mish nan_to_num ne nextafter polar pow
    _prelu_kernel reciprocal relu relu6 remainder round rsqrt sgn sigmoid sign signbit silu sin sinc
    sinh softplus softshrink sqrt square tan tanh threshold trunc xlogy
"""
_LIKE = "empty_like full_like ones_like zeros_like"
_MADE = {0: "empty full ones zeros", 1: "new_empty new_full new_ones new_zeros"}
"""From a shape alone, which is this argument."""
_NOT_IN_PLACE = """
    _prelu_kernel fmax fmin isfinite isinf isnan log_sigmoid_forward logaddexp maximum minimum polar
    rsub signbit softplus softshrink hardshrink
"""
_LINEAR = "alias clone contiguous detach lift_fresh lift_fresh_copy positive"
"""In their only tensor."""
_BACKWARD = """
    elu_backward gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    leaky_relu_backward log_sigmoid_backward logit_backward mish_backward native_dropout_backward
    sigmoid_backward silu_backward softplus_backward softshrink_backward tanh_backward
    threshold_backward
"""
"""Linear in the gradient, their first tensor."""


def rules() -> dict[str, DivisionRule]:
    """Returns the rules by family; operators in place have the same."""
    table = {name: DivisionRule(_nonlinear) for name in _NONLINEAR.split()}
    table |= dict.fromkeys(("add", "sub", "rsub"), DivisionRule(_sum))
    table |= {"mul": DivisionRule(_product), "div": DivisionRule(_quotient)}
    table |= {"neg": DivisionRule(_linear_in_first), "masked_fill": DivisionRule(_masked_fill)}
    table |= {"copy": DivisionRule(_nonlinear)}
    table |= {f"{name}_": rule for name, rule in table.items() if name not in _NOT_IN_PLACE.split()}
    table |= {name: DivisionRule(_nonlinear) for name in _LIKE.split()}
    table |= {name: DivisionRule(_linear_in_first) for name in (_LINEAR + _BACKWARD).split()}
    table |= {"where": DivisionRule(_where), "_to_copy": DivisionRule(_converted)}
    for position, names in _MADE.items():
        rule = DivisionRule(_made, partial(output_shape, position))
        table |= dict.fromkeys(names.split(), rule)
    return {f"aten.{name}": rule for name, rule in table.items()}


def _elementwise(
    operator: Operator, terms: Sequence[Sequence[int]], linear: Sequence[int] = ()
) -> Iterator[Strategy]:
    shapes = [type_.shape for type_ in operator.outputs if type_ is not None]
    if not shapes or any(shape != shapes[0] for shape in shapes):
        return
    letters = letters_of(shapes[0])
    inputs = [broadcast(type_.shape, shapes[0], letters) for type_ in operator.inputs]
    outputs = [TermSum(letters, terms)] * len(operator.outputs)
    yield from divisions(inputs, outputs, linear)


def _all(operator: Operator) -> Sequence[int]:
    return range(len(operator.inputs))


def _nonlinear(operator: Operator, devices: int) -> Iterator[Strategy]:
    return _elementwise(operator, [_all(operator)])


def _linear_in_first(operator: Operator, devices: int) -> Iterator[Strategy]:
    return _elementwise(operator, [_all(operator)], [0])


def _sum(operator: Operator, devices: int) -> Iterator[Strategy]:
    """A number is a term that is in no input: it would be added on each device."""
    terms = [[each.input] if isinstance(each, Input) else [] for each in operator.arguments[:2]]
    return _elementwise(operator, terms, _all(operator))


def _product(operator: Operator, devices: int) -> Iterator[Strategy]:
    return _elementwise(operator, [_all(operator)], _all(operator))


def _quotient(operator: Operator, devices: int) -> Iterator[Strategy]:
    rounded = any(name == "rounding_mode" and mode for name, mode in operator.keywords)
    dividend = operator.input_at(0)
    linear = [] if rounded or dividend is None else [dividend]
    return _elementwise(operator, [_all(operator)], linear)


def _where(operator: Operator, devices: int) -> Iterator[Strategy]:
    if len(operator.inputs) != 3 or len(operator.outputs) != 1:
        return iter(())
    return _elementwise(operator, [[0, 1], [0, 2]], [1, 2])


def _masked_fill(operator: Operator, devices: int) -> Iterator[Strategy]:
    zero = operator.argument(2) in (0, False)
    return _elementwise(operator, [_all(operator)], [0] if zero else [])


def _converted(operator: Operator, devices: int) -> Iterator[Strategy]:
    """A sum goes through if no term loses digits."""
    (source,), result = operator.inputs, operator.output
    floats = all("float" in type_.dtype for type_ in (source, result))
    exact = floats and result.element_bytes >= source.element_bytes
    return _elementwise(operator, [[0]], [0] if exact or source.dtype == result.dtype else [])


def _made(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Each device makes its part. A tensor that is given is read for its type alone."""
    for dim in range(len(operator.output.shape)):
        yield Strategy((R,) * len(operator.inputs), (Shard(dim),))

"""Sums and other reductions, losses, softmax, and what else works along some dimensions alone.

A sum over a divided dimension is partial. No other reduction can be had from those of the parts by
adding them up: the mean of fewer elements divides by another number. (A mean written as a sum and a
division can be divided.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from pipedream.graph.placements.operators import Operator
from pipedream.sharding.rules.indices import TermSum, broadcast, divisions, letters_of
from pipedream.sharding.rules.strategy import DivisionRule, Strategy

SUM = 2
"""torch's number for the reduction of a loss: 0 for none, 1 for the mean."""
_REDUCTIONS = "all amax amin any argmax argmin logsumexp max min prod std var"
_LOSSES = {
    "mse_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "soft_margin_loss": 2,
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
}
"""Losses of each element, and which of their arguments is the reduction."""


def rules() -> dict[str, DivisionRule]:
    table = {
        "sum": DivisionRule(partial(_reduction, summed=True)),
        "mean": DivisionRule(partial(_reduction, linear=[0])),
        "linalg_vector_norm": DivisionRule(partial(_reduction, dims_at=2)),
        "cumsum": DivisionRule(partial(_along, linear=[0])),
        "flip": DivisionRule(partial(_along, linear=[0])),
        "sort": DivisionRule(_along),
        "argsort": DivisionRule(_along),
        "topk": DivisionRule(partial(_along, dim_at=2)),
        "_softmax": DivisionRule(_along),
        "_log_softmax": DivisionRule(_along),
        "_safe_softmax": DivisionRule(_along),
        "_softmax_backward_data": DivisionRule(partial(_along, dim_at=2, linear=[0])),
        "_log_softmax_backward_data": DivisionRule(partial(_along, dim_at=2, linear=[0])),
    }
    table |= {name: DivisionRule(_reduction) for name in _REDUCTIONS.split()}
    table |= {name: DivisionRule(partial(_loss, position)) for name, position in _LOSSES.items()}
    table |= {
        f"{name}_backward": DivisionRule(partial(_loss_backward, position + 1))
        for name, position in _LOSSES.items()
        if name != "binary_cross_entropy_with_logits"  # whose backward pass is of other operators
    }
    return {f"aten.{name}": rule for name, rule in table.items()}


def _dims(operator: Operator, position: int, default: int | None) -> set[int]:
    """Returns the dimensions of the first input that an argument names; all if there is none."""
    rank = len(operator.inputs[0].shape)
    named = operator.argument(position, dict(operator.keywords).get("dim", default))
    numbers = named if isinstance(named, tuple) else (named,)
    dims = {each % rank for each in numbers if rank and type(each) is int}
    return dims or set(range(rank))


def _reduction(
    operator: Operator,
    devices: int,
    summed: bool = False,
    linear: Collection[int] = (),
    dims_at: int = 1,
) -> Iterator[Strategy]:
    """Divides a reduction along some dimensions, which stay in the output or not."""
    if len(operator.inputs) != 1:
        return
    shape = operator.inputs[0].shape
    letters, dims = letters_of(shape), _dims(operator, dims_at, None)
    kept = "".join("." if dim in dims else each for dim, each in enumerate(letters))
    left = "".join(each for dim, each in enumerate(letters) if dim not in dims)
    outputs = []
    for type_ in operator.outputs:
        rank = -1 if type_ is None else len(type_.shape)
        if rank not in (len(kept), len(left)):
            return
        outputs.append(TermSum(kept if rank == len(kept) else left, [[0]]))
    yield from divisions([letters if summed else kept], outputs, [0] if summed else linear)


def _along(
    operator: Operator, devices: int, linear: Collection[int] = (), dim_at: int = 1
) -> Iterator[Strategy]:
    """Divides tensors with the same dimensions, one of which cannot be divided."""
    shape = operator.inputs[0].shape
    dims = _dims(operator, dim_at, -1)
    letters = "".join("." if d in dims else each for d, each in enumerate(letters_of(shape)))
    numbers = range(len(operator.inputs))
    inputs = [letters] * len(operator.inputs)
    yield from divisions(inputs, [TermSum(letters, [numbers])] * len(operator.outputs), linear)


def _loss(position: int, operator: Operator, devices: int) -> Iterator[Strategy]:
    """Divides a loss of each element, or their sum; their mean cannot be divided."""
    reduction = operator.integer(position, 1)
    if reduction == 0 or reduction == SUM:
        shape = operator.inputs[0].shape
        letters = letters_of(shape)
        inputs = [broadcast(each.shape, shape, letters) for each in operator.inputs]
        output = TermSum("" if reduction else letters, [range(len(inputs))])
        yield from divisions(inputs, [output])


def _loss_backward(position: int, operator: Operator, devices: int) -> Iterator[Strategy]:
    """The gradient of the loss comes first; that of the mean is divided by all elements."""
    reduction = operator.integer(position, 1)
    shape = operator.inputs[1].shape
    letters = letters_of(shape) if reduction in (0, SUM) else "." * len(shape)
    inputs = [broadcast(each.shape, shape, letters) for each in operator.inputs]
    yield from divisions(inputs, [TermSum(letters, [range(len(inputs))])], [0])

"""Recurrent layers whose steps are one operator: each device has a part of the batch.

What such an operator leaves for its backward pass, the workspace, has a format of its own and
nobody can divide it. Where the batch is divided, devices have different ones: they are called terms
of a sum, and since an operator must find its workspace as it is (`Operator.stays`), nobody adds
them up.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.graph.placements.operators import Operator, TensorType
from pipedream.graph.placements.placement import Placement, Shard
from pipedream.sharding.rules.strategy import DivisionRule, P, R, Strategy, no_chunks

_WEIGHTS = range(1, 5)
_WORKSPACE = 22
_RESULTS = 3


def rules() -> dict[str, DivisionRule]:
    return {
        "aten.mkldnn_rnn_layer": DivisionRule(_layer, allows=no_chunks),
        "aten.mkldnn_rnn_layer_backward": DivisionRule(_backward, allows=no_chunks),
    }


def _layer(operator: Operator, devices: int) -> Iterator[Strategy]:
    """Steps, four weights and two states; all steps, the last states, the workspace."""
    inputs = _placed(operator, dict.fromkeys(_WEIGHTS, R))
    results = [_batch(type_) for type_ in operator.outputs[:_RESULTS]]
    yield Strategy(tuple(inputs), (*results, P))


def _backward(operator: Operator, devices: int) -> Iterator[Strategy]:
    """The gradients of the steps, of the weights, which are sums, and of the states."""
    weights = dict.fromkeys(_WEIGHTS, R)
    inputs = _placed(operator, {**weights, _WORKSPACE: P})
    steps, *_, state, cell = map(_batch, operator.outputs)
    yield Strategy(tuple(inputs), (steps, *(P for _ in weights), state, cell))


def _placed(operator: Operator, others: dict[int, Placement]) -> list[Placement]:
    """Of the inputs; `others`: by argument, those that are not divided by the batch."""
    placed: list[Placement] = [*map(_batch, operator.inputs)]
    for argument, placement in others.items():
        number = operator.input_at(argument)
        if number is not None:
            placed[number] = placement
    return placed


def _batch(type_: TensorType | None) -> Placement:
    """The batch is the last dimension but one, of steps and of states."""
    return R if type_ is None else Shard(max(0, len(type_.shape) - 2))

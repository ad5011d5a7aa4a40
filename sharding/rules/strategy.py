"""How the devices of one mesh axis can divide an operator, and what each of them then executes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from pipedream.graph.placements.operators import Argument, Operator, TensorType
from pipedream.graph.placements.placement import Partial, Placement, Placements, Replicate, Shard
from pipedream.graph.placements.regions import split

R, P = Replicate(), Partial()


@dataclass(frozen=True)
class Strategy:
    """A placement for each input and output of an operator.

    If each device executes the operator (`local_operator`) on its local inputs, it gets its local
    outputs. One of an output that is not computed means nothing.
    """

    inputs: Placements
    outputs: Placements
    within: Placement = R
    """Of the tensors that devices add up in the middle of the operator (`DivisionRule.sums`):
    Partial where they do. Such an operator is not executed as it is, but in steps.
    """

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Returns the sharded ones among the placements of inputs and outputs."""
        return tuple(each for each in (*self.inputs, *self.outputs) if isinstance(each, Shard))


Arguments: TypeAlias = Mapping[int, Argument]
"""Positional arguments that are different on a device."""


@dataclass(frozen=True)
class DivisionRule:
    """Says how one family of operators can be divided."""

    divisions: Callable[[Operator, int], Iterable[Strategy]]
    """The strategies of an operator on so many devices; one that does not fit is dropped."""
    arguments: Callable[[Operator, Operator], Arguments] = lambda whole, local: {}
    """Of an operator and the same with the types of local inputs and outputs: the arguments that
    are to be different. By default none, for operators that take all sizes from their inputs.
    """
    allows: Callable[[Operator, Strategy, int], bool] = lambda operator, strategy, devices: True
    """Whether a strategy, all of whose sharded dimensions are in so many times as many chunks, is
    one. By default it is: it does not matter which indices a device has, if they are the same
    everywhere.
    """
    sums: Callable[[Operator], tuple[TensorType, ...]] = lambda operator: ()
    """The types of what devices add up in the middle of the operator where a strategy says so, in
    the order in which they do.
    """


def output_shape(position: int, whole: Operator, local: Operator) -> Arguments:
    """Returns the argument at this position, where that is the shape of the output."""
    return {position: local.output.shape}


def no_chunks(operator: Operator, strategy: Strategy, devices: int) -> bool:
    """Tells whether nothing is in chunks, for operators to which the order matters."""
    return all(each.chunks == 1 for each in strategy.shards)


def replicated(operator: Operator) -> Strategy:
    return Strategy((R,) * len(operator.inputs), (R,) * len(operator.outputs))


def in_chunks(strategies: Iterable[Strategy], chunks: Iterable[int]) -> Iterator[Strategy]:
    """Yields the strategies with their chunks, and with these multiples of them."""
    numbers = tuple(dict.fromkeys((1, *chunks)))
    for strategy in strategies:
        for number in numbers if strategy.shards else (1,):
            yield Strategy(
                tuple(_with_chunks(each, number) for each in strategy.inputs),
                tuple(_with_chunks(each, number) for each in strategy.outputs),
                _with_chunks(strategy.within, number),
            )


def fits(operator: Operator, strategy: Strategy, devices: int) -> bool:
    """Tells whether all tensors can be placed so, with some elements of each on every device.

    What is written in place (the name of the operator ends with _) is the output.
    """
    if operator.family.endswith("_") and operator.writes:
        (written, *_), (result, *_) = operator.writes, strategy.outputs
        if strategy.inputs[written] != result:
            return False
    return all(_fits(*each, devices) for each in _placed(operator, strategy))


def is_even(operator: Operator, strategy: Strategy, devices: int) -> bool:
    """Tells whether all devices have parts of the same sizes."""
    return all(
        not isinstance(placement, Shard)
        or type_.shape[placement.dim] // placement.chunks % devices == 0
        for type_, placement in _placed(operator, strategy)
    )


def _placed(operator: Operator, strategy: Strategy) -> Iterator[tuple[TensorType, Placement]]:
    """Yields the type and the placement of each tensor that it reads or computes."""
    types = *operator.inputs, *operator.outputs
    for type_, placement in zip(types, (*strategy.inputs, *strategy.outputs), strict=True):
        if type_ is not None:
            yield type_, placement


def local_type(type_: TensorType, placement: Placement, devices: int, index: int) -> TensorType:
    """Returns the type of what the device with this index holds."""
    if not isinstance(placement, Shard):
        return type_
    dim, chunks = placement.dim, placement.chunks
    begin, end = split(type_.shape[dim] // chunks, devices, index)
    shape = (*type_.shape[:dim], chunks * (end - begin), *type_.shape[dim + 1 :])
    return type_.model_copy(update={"shape": shape})


def _with_chunks(placement: Placement, number: int) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    return replace(placement, chunks=placement.chunks * number)


def _fits(type_: TensorType, placement: Placement, devices: int) -> bool:
    """There are no sums of truth values."""
    if not isinstance(placement, Shard):
        return placement == R or type_.dtype != "bool"
    if placement.dim >= len(type_.shape):
        return False
    size, chunks = type_.shape[placement.dim], placement.chunks
    return size % chunks == 0 and size // chunks >= devices

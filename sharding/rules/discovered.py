"""Operators that no rule knows, divided as was found by running them (`Operator.ways`).

The search that finds the ways is pd-profile's: `profiler.discovery`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipedream.graph.placements.operators import Argument, Operator, TensorType, Way
from pipedream.graph.placements.placement import Placement, parse_placements, show_placements
from pipedream.sharding.rules.strategy import Arguments, DivisionRule, Strategy, no_chunks


def as_way(strategy: Strategy) -> Way:
    """Returns the placements of a strategy as operators.json has them."""
    return Way(inputs=tuple(_texts(strategy.inputs)), outputs=tuple(_texts(strategy.outputs)))


def _divisions(operator: Operator, devices: int) -> Iterator[Strategy]:
    for way in operator.ways:
        yield Strategy(_placements(way.inputs), _placements(way.outputs))


def is_shape(argument: Argument, type_: TensorType | None) -> bool:
    """Tells whether an argument is the shape of such a tensor; -1 stands for what follows."""
    if type_ is None or not isinstance(argument, tuple) or len(argument) != len(type_.shape):
        return False
    return all(one in (-1, size) for one, size in zip(argument, type_.shape, strict=True))


def _arguments(whole: Operator, local: Operator) -> Arguments:
    """A list of integers that is the shape of one of the tensors is that of the local one."""
    pairs = list(zip((*whole.outputs, *whole.inputs), (*local.outputs, *local.inputs), strict=True))
    return {
        position: own.shape
        for position, value in enumerate(whole.arguments)
        for type_, own in reversed(pairs)
        if own is not None and is_shape(value, type_)
    }


def _texts(placements: Iterable[Placement]) -> Iterator[str]:
    return (show_placements((each,)) for each in placements)


def _placements(texts: Iterable[str]) -> tuple[Placement, ...]:
    return tuple(parse_placements(text)[0] for text in texts)


RULE = DivisionRule(_divisions, _arguments, no_chunks)

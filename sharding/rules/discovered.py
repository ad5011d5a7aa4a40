"""Operators that no rule knows, divided as was found by running them (`Operator.ways`).

The search that finds the ways is pd-profile's: `profiler.discovery`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipedream.graph.placements.operators import Argument, Operator, Way
from pipedream.graph.placements.placement import Placement, parse_placements, show_placements
from pipedream.sharding.rules.strategy import Arguments, DivisionRule, Strategy, no_chunks


def as_way(strategy: Strategy) -> Way:
    """Returns the placements of a strategy as operators.json has them."""
    return Way(inputs=tuple(_texts(strategy.inputs)), outputs=tuple(_texts(strategy.outputs)))


def _divisions(operator: Operator, devices: int) -> Iterator[Strategy]:
    for way in operator.ways:
        yield Strategy(_placements(way.inputs), _placements(way.outputs))


def _arguments(whole: Operator, local: Operator) -> Arguments:
    """A list of integers that is the shape of one of the tensors is that of the local one."""
    pairs = zip((*whole.outputs, *whole.inputs), (*local.outputs, *local.inputs), strict=True)
    shapes: dict[Argument, tuple[int, ...]] = {
        type_.shape: own.shape
        for type_, own in reversed(list(pairs))
        if type_ is not None and own is not None and type_.shape != own.shape
    }
    return {
        position: shapes[value]
        for position, value in enumerate(whole.arguments)
        if isinstance(value, tuple) and value in shapes
    }


def _texts(placements: Iterable[Placement]) -> Iterator[str]:
    return (show_placements((each,)) for each in placements)


def _placements(texts: Iterable[str]) -> tuple[Placement, ...]:
    return tuple(parse_placements(text)[0] for text in texts)


RULE = DivisionRule(_divisions, _arguments, no_chunks)

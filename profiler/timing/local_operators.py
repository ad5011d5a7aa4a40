"""The operators that devices have where others are divided, timed as one device runs them.

Collectives are left out. Whole operators are timed among their local ones, in the same way: a
planner takes ratios (`sharding.local_times`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from pipedream.graph.placements.operators import Operator, OperatorGraph, TimedOperator
from pipedream.graph.placements.placement import Mesh
from pipedream.sharding.rules import local_operator, strategies

_WORTH, _LIKELY = 0.99, 0.9
"""Of the seconds of all operators: those that make up so much are timed; where nobody asked."""
_SECONDS = 0.1
"""After so many an operator is not repeated further."""


def time_local_operators(
    graph: OperatorGraph,
    seconds: Mapping[str, float],
    shards: Sequence[int] | None,
    alone: Callable[..., Mapping[Operator, float | None]],
) -> tuple[TimedOperator, ...]:
    """Returns the seconds of whole and of local operators, for so many devices.

    `seconds`: of the calls of the graph, by name. `shards`: None for halves of those that take
    most, as any mesh may have them. `alone`: gives the seconds of operators, `enough` of them for
    each; None for one that cannot be run by itself, which is left out.
    """
    worth = _LIKELY if shards is None else _WORTH
    counts = (2,) if shards is None else shards
    of_operator: dict[Operator, float] = defaultdict(float)
    for call in graph.calls:
        of_operator[call.operator] += seconds.get(call.name, 0.0)
    wanted: dict[Operator, None] = {}
    for operator in _worth_it(of_operator, worth):
        locals_ = [each for mesh in meshes(counts) for each in local_operators(operator, mesh)]
        if divided := dict.fromkeys(each for each in locals_ if each != operator):
            wanted |= {operator: None, **divided}
    timed = alone(wanted, enough=_SECONDS)
    return tuple(
        TimedOperator(operator=operator, seconds=own)
        for operator in wanted
        if (own := timed[operator]) is not None
    )


def meshes(shards: Sequence[int]) -> list[Mesh]:
    """Returns the meshes of so many devices, of one axis and of two."""
    pairs = ((count, first) for count in shards for first in range(2, count // 2 + 1))
    divided = ((first, count // first) for count, first in pairs if count % first == 0)
    return [*((count,) for count in shards), *divided]


def local_operators(operator: Operator, mesh: Mesh) -> Iterator[Operator]:
    """Yields what the first device has of the operator, in each way to divide it."""
    if not mesh:
        yield operator
        return
    for strategy in strategies(operator, mesh[0]):
        yield from local_operators(local_operator(operator, strategy, mesh[0], 0), mesh[1:])


def _worth_it(seconds: Mapping[Operator, float], worth: float) -> Iterator[Operator]:
    """Yields the operators that take longest, until they make up this part of all."""
    enough, so_far = worth * sum(seconds.values()), 0.0
    for operator in sorted(seconds, key=lambda each: -seconds[each]):
        if so_far < enough:
            yield operator
            so_far += seconds[operator]

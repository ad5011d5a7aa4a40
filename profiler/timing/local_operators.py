"""The operators that devices have where others are divided, timed as one device runs them.

Collectives are left out. Whole operators are timed too: a planner takes ratios
(`sharding.local_times`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pipedream.graph.placements.operators import Operator, OperatorGraph, TimedOperator
from pipedream.graph.placements.placement import Mesh
from pipedream.graph.plan import Plan
from pipedream.sharding.local_times import first_part
from pipedream.sharding.planned import planned_strategies
from pipedream.sharding.rules import local_operator, strategies

Shards = tuple[int, ...] | Plan | None
"""Numbers of devices whose parts of operators are timed, in each way to divide one; a plan: those
of its stages, and what None stands for: halves of the operators that take most, as any mesh may
have them.
"""

_WORTH, _LIKELY = 0.99, 0.9
"""Of the seconds of all operators: those that make up so much are timed; where nobody asked."""
_SECONDS = 0.1
"""After so many an operator is not repeated further."""


def time_local_operators(
    graph: OperatorGraph,
    nodes: Mapping[str, str],
    seconds: Mapping[str, float],
    shards: Shards,
    alone: Callable[..., Mapping[Operator, float | None]],
    at_once: Callable[..., Mapping[Operator, float | None]],
) -> tuple[TimedOperator, ...]:
    """Returns the seconds of whole and of local operators, for so many devices.

    `nodes`, `seconds`: of the calls of the graph, by name. `alone`: gives the seconds of operators,
    `enough` of them for each; None for one that cannot be run by itself, which is left out.
    `at_once`: the same of parts, which the devices of a mesh do at the same time.
    """
    of_operator: dict[Operator, float] = defaultdict(float)
    for call in graph.calls:
        of_operator[call.operator] += seconds.get(call.name, 0.0)
    if isinstance(shards, tuple):
        parts = _all_parts(worth_most(of_operator, _WORTH), shards)
    else:
        parts = _all_parts(worth_most(of_operator, _LIKELY), (2,))
    if isinstance(shards, Plan):
        worth = set(worth_most(of_operator, _WORTH))
        for operator, part in planned_parts(shards, graph, nodes):
            if operator in worth:
                parts[operator][part] = None
    divided = {operator: own for operator, own in parts.items() if own.keys() - {operator}}
    wanted = dict.fromkeys(part for own in divided.values() for part in own)
    timed = dict(alone(divided, enough=_SECONDS))
    timed |= at_once([part for part in wanted if part not in divided], enough=_SECONDS)
    return tuple(
        TimedOperator(operator=operator, seconds=taken)
        for operator, taken in timed.items()
        if taken is not None
    )


def _all_parts(
    operators: Iterable[Operator], shards: Sequence[int]
) -> dict[Operator, dict[Operator, None]]:
    """Returns what the first of so many devices can have of each, in each way to divide it."""
    parts: dict[Operator, dict[Operator, None]] = defaultdict(dict)
    for operator in operators:
        for mesh in meshes(shards):
            parts[operator] |= dict.fromkeys(local_operators(operator, mesh))
    return parts


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


def planned_parts(
    plan: Plan, graph: OperatorGraph, nodes: Mapping[str, str]
) -> Iterator[tuple[Operator, Operator]]:
    """Yields the operators that the plan divides, each with what the first device has of it."""
    operators = {call.name: call.operator for call in graph.calls}
    for stage in plan.stages:
        if stage.mesh is None or stage.placements is None:
            continue
        chosen = planned_strategies(stage.placements.operators, graph, nodes, stage.mesh)
        for name, strategies_ in chosen.items():
            yield operators[name], first_part(operators[name], strategies_, stage.mesh)


def worth_most(seconds: Mapping[Operator, float], worth: float) -> Iterator[Operator]:
    """Yields the operators that take longest, until they make up this part of all."""
    enough, so_far = worth * sum(seconds.values()), 0.0
    for operator in sorted(seconds, key=lambda each: -seconds[each]):
        if so_far < enough:
            yield operator
            so_far += seconds[operator]

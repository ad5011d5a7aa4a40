"""What one device has of divided operators: everything possible, what a plan says, what is likely.

Likely is what the solver of shardings (`optimizer/intra`) may choose, whose meshes and links are
not known while a model is profiled. What devices have on a mesh of eight is, where an axis divides
nothing, what they have on one of two or four; so the parts of 2, 4 and 8 devices that all axes
divide are all there are on meshes of so many. Among them the smallest are the likeliest: what an
operator reads and computes on a device is what it may have to be sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pipedream.graph.placements.operators import Operator, OperatorGraph
from pipedream.graph.placements.placement import Mesh
from pipedream.graph.plan import Plan
from pipedream.profiler.timing.operator_times import touched_by
from pipedream.sharding.local_times import first_part
from pipedream.sharding.planned import planned_strategies
from pipedream.sharding.rules import local_operator, strategies

_LIKELY = (2, 4, 8)
"""Numbers of devices."""


class DividedOperator(NamedTuple):
    """`part`: what the first device, which has the largest parts, has of the `whole`."""

    whole: Operator
    part: Operator


def all_parts(
    operators: Iterable[Operator], shards: Sequence[int], chunks: tuple[int, ...]
) -> Iterator[DividedOperator]:
    """Yields what one of so many devices can have of each, in each way to divide it; dimensions
    also in these numbers of chunks.
    """
    for operator in operators:
        parts = (local_operators(operator, mesh, chunks) for mesh in meshes(shards))
        for part in dict.fromkeys(part for own in parts for part in own):
            yield DividedOperator(operator, part)


def likely_parts(
    seconds: Mapping[Operator, float], chunks: tuple[int, ...]
) -> list[DividedOperator]:
    """Returns the parts that matter, first those that matter most: of the operators that take the
    most `seconds`, and of these the smallest parts.
    """
    worth = dict[DividedOperator, float]()
    for operator, taken in seconds.items():
        for devices in _LIKELY:
            parts = list(all_parts([operator], [devices], chunks))
            parts.sort(key=lambda each: touched_by(each.part))
            for place, each in enumerate(parts, 1):
                worth.setdefault(each, taken / place)
    return sorted(worth, key=lambda each: -worth[each])


def meshes(shards: Sequence[int]) -> list[Mesh]:
    """Returns the meshes of so many devices, of one axis and of two."""
    pairs = ((count, first) for count in shards for first in range(2, count // 2 + 1))
    divided = ((first, count // first) for count, first in pairs if count % first == 0)
    return [*((count,) for count in shards), *divided]


def local_operators(
    operator: Operator, mesh: Mesh, chunks: tuple[int, ...] = ()
) -> Iterator[Operator]:
    """Yields what the first device has of the operator, in each way to divide it; dimensions also
    in these numbers of chunks.
    """
    if not mesh:
        yield operator
        return
    for strategy in strategies(operator, mesh[0], chunks):
        local = local_operator(operator, strategy, mesh[0], 0)
        yield from local_operators(local, mesh[1:], chunks)


def planned_parts(
    plan: Plan, graph: OperatorGraph, nodes: Mapping[str, str]
) -> Iterator[DividedOperator]:
    """Yields the operators that the plan divides, with what it has one device have of them."""
    operators = {call.name: call.operator for call in graph.calls}
    for stage in plan.stages:
        if stage.mesh is None or stage.placements is None:
            continue
        chosen = planned_strategies(stage.placements.operators, graph, nodes, stage.mesh)
        for name, strategies_ in chosen.items():
            whole = operators[name]
            yield DividedOperator(whole, first_part(whole, strategies_, stage.mesh))


def worth_most(seconds: Mapping[Operator, float], worth: float) -> Iterator[Operator]:
    """Yields the operators that take longest, until they make up this part of all."""
    enough, so_far = worth * sum(seconds.values()), 0.0
    for operator in sorted(seconds, key=lambda each: -seconds[each]):
        if so_far < enough:
            yield operator
            so_far += seconds[operator]

"""What one device has of divided operators: everything possible, what a plan says, what is likely.

Where an axis of a mesh divides nothing, devices have what they have on the mesh without that axis.
So the parts of 2, 4 and 8 devices that all axes divide are all there are on meshes of eight.

Likely is what the solver of shardings (`optimizer/intra`) may choose, whose meshes and links are
not known while a model is profiled: the smallest parts are the likeliest, since what an operator
reads and computes on a device is what it may have to be sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from pipedream.graph.placements.operators import Operator, OperatorGraph
from pipedream.graph.placements.placement import Mesh
from pipedream.graph.plan import Plan
from pipedream.profiler.timing.cold_inputs import touched_by
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
    operators: Iterable[Operator], shards: Iterable[int], chunks: tuple[int, ...]
) -> Iterator[DividedOperator]:
    """Yields what one of so many devices can have of each, in each way to divide it; dimensions
    also in these numbers of chunks.
    """
    counts = sorted({count for most in shards for count in _divisors(most)})
    for operator in operators:
        of_counts = (parts_of(operator, count, chunks) for count in counts)
        yield from dict.fromkeys(each for own in of_counts for each in own)


def likely_parts(
    seconds: Mapping[Operator, float], chunks: tuple[int, ...]
) -> list[DividedOperator]:
    """Returns the parts that matter, first those that matter most: of the operators that take the
    most `seconds`, and of these the smallest parts.
    """
    worth = dict[DividedOperator, float]()
    for operator, taken in seconds.items():
        for devices in _LIKELY:
            parts = sorted(
                parts_of(operator, devices, chunks), key=lambda own: touched_by(own.part)
            )
            worth |= {each: taken / place for place, each in enumerate(parts, 1)}
    return sorted(worth, key=lambda each: -worth[each])


def parts_of(operator: Operator, devices: int, chunks: tuple[int, ...]) -> list[DividedOperator]:
    """Returns what the first of so many devices has where all axes of a mesh divide it."""
    parts = (part for mesh in meshes(devices) for part in _divided(operator, mesh, chunks))
    return [DividedOperator(operator, part) for part in dict.fromkeys(parts)]


def meshes(devices: int) -> list[Mesh]:
    """Returns the meshes of so many devices, of one axis and of two."""
    first_axes = [each for each in _divisors(devices) if each < devices]
    return [(devices,), *((first, devices // first) for first in first_axes)]


def _divisors(number: int) -> list[int]:
    return [each for each in range(2, number + 1) if number % each == 0]


def _divided(operator: Operator, mesh: Mesh, chunks: tuple[int, ...]) -> Iterator[Operator]:
    if not mesh:
        yield operator
        return
    ways = (each for each in strategies(operator, mesh[0], chunks) if each.shards)
    for local in dict.fromkeys(local_operator(operator, way, mesh[0], 0) for way in ways):
        yield from _divided(local, mesh[1:], chunks)


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
            each = DividedOperator(
                operators[name], first_part(operators[name], strategies_, stage.mesh)
            )
            if each.part != each.whole:
                yield each


def worth_most(seconds: Mapping[Operator, float], worth: float) -> Iterator[Operator]:
    """Yields the operators that take longest, until they make up this part of all."""
    enough, so_far = worth * sum(seconds.values()), 0.0
    for operator in sorted(seconds, key=lambda each: -seconds[each]):
        if so_far < enough:
            yield operator
            so_far += seconds[operator]

"""From the strategies of operators to the lines of plan.json, and back to the calls of a stage.

A stage is traced anew in each rank, where calls have other names than in the whole model. They are
found by the node that makes them, the pass, the operator, and which of the node's calls of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

from pipedream.graph.placements.operators import Operator, OperatorCall, OperatorGraph
from pipedream.graph.placements.placement import Mesh, Placement, Replicate
from pipedream.graph.placements.strategy_texts import CallPlacements, NodeStrategies
from pipedream.sharding.assignment import Assignment
from pipedream.sharding.axis import local_operators
from pipedream.sharding.rules import strategies
from pipedream.sharding.rules.strategy import P, R, Strategy

_Key: TypeAlias = tuple[str, bool, str, int]
"""Node, whether backward, operator, and how many calls of it the node makes before."""


@dataclass(frozen=True)
class CallOwners:
    """Of which node each call is, by its name, and the calls of the backward pass."""

    nodes: Mapping[str, str]
    backward: Set[str]

    def keys(self, graph: OperatorGraph) -> Iterator[tuple[_Key, OperatorCall]]:
        """Yields the calls that have a node, with what they are found by."""
        counts = Counter[tuple[str, bool, str]]()
        for call in graph.calls:
            if call.name in self.nodes:
                first = self.nodes[call.name], call.name in self.backward, call.operator.target
                yield (*first, counts[first]), call
                counts[first] += 1


def strategy_texts(
    assignment: Assignment, owners: CallOwners, nodes: Collection[str]
) -> tuple[NodeStrategies, ...]:
    """Returns the lines of these nodes; those whose lines are the same together."""
    lines: dict[str, tuple[list[str], list[str]]] = {}
    for (node, backward, _, _), call in owners.keys(assignment.graph):
        if node in nodes:
            own = lines.setdefault(node, ([], []))
            own[backward].append(_placements(call, assignment.strategies[call.name]).text)
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = defaultdict(list)
    for node, (forward, backward_lines) in lines.items():
        alike[tuple(forward), tuple(backward_lines)].append(node)
    return tuple(
        NodeStrategies(nodes=tuple(own), forward=forward, backward=backward)
        for (forward, backward), own in alike.items()
    )


def planned_strategies(
    texts: Sequence[NodeStrategies], graph: OperatorGraph, owners: CallOwners, mesh: Mesh
) -> dict[str, tuple[Strategy, ...]]:
    """Returns what the plan says of the calls of a graph, by name. It says nothing of calls that
    only this graph has.
    """
    lines: dict[_Key, CallPlacements] = {}
    for each in texts:
        for backward, own in ((False, each.forward), (True, each.backward)):
            counts = Counter[str]()
            for text in own:
                placements = CallPlacements.parse(text, len(mesh))
                number = counts[placements.target]
                counts[placements.target] += 1
                for node in each.nodes:
                    lines[node, backward, placements.target, number] = placements
    return {
        call.name: _strategies(lines[key], len(mesh))
        for key, call in owners.keys(graph)
        if key in lines and _is_of(lines[key], call.operator)
    }


def is_possible(operator: Operator, chosen: Sequence[Strategy], mesh: Mesh) -> bool:
    """Whether all devices can follow these strategies, one for each axis."""
    for axis, strategy in enumerate(chosen):
        chunks = tuple(sorted({each.chunks for each in strategy.shards} - {1}))
        for local in local_operators(operator, tuple(chosen[:axis]), mesh):
            if strategy not in strategies(local, mesh[axis], chunks):
                return False
    return True


def _placements(call: OperatorCall, chosen: Sequence[Strategy]) -> CallPlacements:
    computed = [type_ is not None for type_ in call.operator.outputs]
    outputs = zip(*(each.outputs for each in chosen), strict=True)
    within = tuple(each.within for each in chosen)
    return CallPlacements(
        call.operator.target,
        tuple(zip(*(each.inputs for each in chosen), strict=True)),
        tuple(own if known else None for own, known in zip(outputs, computed, strict=True)),
        within if P in within else None,
    )


def _strategies(placements: CallPlacements, axes: int) -> tuple[Strategy, ...]:
    nothing: tuple[Placement, ...] = (Replicate(),) * axes
    outputs = [nothing if each is None else each for each in placements.outputs]
    within = placements.within or (R,) * axes
    return tuple(
        Strategy(
            tuple(each[axis] for each in placements.inputs),
            tuple(each[axis] for each in outputs),
            within[axis],
        )
        for axis in range(axes)
    )


def _is_of(placements: CallPlacements, operator: Operator) -> bool:
    """Whether it has as many inputs, and the same outputs are computed."""
    computed = [type_ is not None for type_ in operator.outputs]
    return len(placements.inputs) == len(operator.inputs) and computed == [
        each is not None for each in placements.outputs
    ]

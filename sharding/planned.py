"""From the strategies of operators to the lines of plan.json, and back to the calls of a stage.

A stage is traced anew in each rank, where calls have other names than in the whole model. They are
found by the node that makes them, the pass, and the sequence of operators that the node calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from pipedream.graph.placements.operators import Operator, OperatorCall, OperatorGraph, Way
from pipedream.graph.placements.placement import Mesh, Placement, Shard
from pipedream.graph.placements.strategy_texts import CallPlacements, NodeStrategies
from pipedream.sharding.assignment import Assignment
from pipedream.sharding.axis import local_operators
from pipedream.sharding.rules import RULES, strategies
from pipedream.sharding.rules.discovered import as_way
from pipedream.sharding.rules.strategy import R, Strategy


def strategy_texts(
    assignment: Assignment, nodes: Mapping[str, str], chosen: Collection[str]
) -> tuple[NodeStrategies, ...]:
    """Returns the lines of the chosen nodes; those whose lines are the same together. `nodes`: by
    the name of a call.
    """
    lines: dict[str, tuple[list[str], list[str]]] = {}
    backward = assignment.graph.backward_calls()
    for call in assignment.graph.calls:
        node = nodes[call.name]
        if node in chosen:
            own = lines.setdefault(node, ([], []))
            own[call.name in backward].append(
                _placements(call, assignment.strategies[call.name]).text
            )
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = defaultdict(list)
    for node, (forward, backward_lines) in lines.items():
        alike[tuple(forward), tuple(backward_lines)].append(node)
    return tuple(
        NodeStrategies(nodes=tuple(own), forward=forward, backward=backward)
        for (forward, backward), own in alike.items()
    )


@dataclass(frozen=True)
class PlannedCall:
    """What the plan says of a call. `sure`: its node makes no calls here but those in the plan. A
    stage that begins there may make others, where what comes to it lies in memory otherwise.
    """

    placements: CallPlacements
    sure: bool


def planned_calls(
    texts: Sequence[NodeStrategies], graph: OperatorGraph, nodes: Mapping[str, str], axes: int
) -> dict[str, PlannedCall]:
    """Returns what the plan says of the calls of a graph, by name; nothing of those that only this
    graph has. Passes without the loss, or without the gradient of an input, lack some of the plan.
    """
    said = {
        (node, backward): [CallPlacements.parse(text, axes) for text in own]
        for each in texts
        for backward, own in ((False, each.forward), (True, each.backward))
        for node in each.nodes
    }
    made: dict[tuple[str, bool], list[OperatorCall]] = defaultdict(list)
    backward_calls = graph.backward_calls()
    for call in graph.calls:
        made[nodes[call.name], call.name in backward_calls].append(call)
    planned: dict[str, PlannedCall] = {}
    for place, calls in made.items():
        lines = said.get(place, [])
        pairs = _matched([each.target for each in lines], [c.operator.target for c in calls])
        sure = len(pairs) == len(calls)
        planned |= {calls[k].name: PlannedCall(lines[line], sure) for line, k in pairs}
    return planned


def planned_strategies(
    texts: Sequence[NodeStrategies], graph: OperatorGraph, nodes: Mapping[str, str], mesh: Mesh
) -> dict[str, tuple[Strategy, ...]]:
    """Returns how the calls of a graph are divided, by name: those of which the plan says it and
    that can be divided so.
    """
    followed = followed_calls(texts, graph, nodes, mesh)
    return {call.name: chosen for call, _, chosen in followed if chosen is not None}


def followed_calls(
    texts: Sequence[NodeStrategies], graph: OperatorGraph, nodes: Mapping[str, str], mesh: Mesh
) -> Iterator[tuple[OperatorCall, PlannedCall, tuple[Strategy, ...] | None]]:
    """Yields the calls of which the plan says how they are divided, with what it says and the
    strategies; None for one that cannot be divided so.
    """
    planned = planned_calls(texts, graph, nodes, len(mesh))
    for call in graph.calls:
        if (said := planned.get(call.name)) is not None:
            yield call, said, follow(call.operator, said.placements, mesh)


def _matched(lines: Sequence[str], calls: Sequence[str]) -> list[tuple[int, int]]:
    """Returns the places of what both have, in the order of both."""
    matcher = SequenceMatcher(None, lines, calls, autojunk=False)
    return [(b.a + k, b.b + k) for b in matcher.get_matching_blocks() for k in range(b.size)]


def follow(
    operator: Operator, placements: CallPlacements, mesh: Mesh
) -> tuple[Strategy, ...] | None:
    """Returns the strategies, one for each axis, that place the operator's tensors so; None if it
    cannot be divided so.
    """
    computed = [type_ is not None for type_ in operator.outputs]
    if len(placements.inputs) != len(operator.inputs) or computed != [
        each is not None for each in placements.outputs
    ]:
        return None
    if operator.family not in RULES:  # a plan says all that is known of it; ranks try it
        operator = operator.model_copy(update={"ways": _ways(operator, placements, len(mesh))})
    chosen: tuple[Strategy, ...] = ()
    for axis, devices in enumerate(mesh):
        wanted = _on_axis(placements, axis)
        chunks = tuple(sorted({e.chunks for e in wanted if isinstance(e, Shard)} - {1}))
        first, *others = local_operators(operator, chosen, mesh)
        alike = (
            each
            for each in strategies(first, devices, chunks)
            if _given(each, computed) == wanted
            and all(each in strategies(other, devices, chunks) for other in others)
        )
        found = next(alike, None)
        if found is None:
            return None
        chosen = (*chosen, found)
    return chosen


def _ways(operator: Operator, placements: CallPlacements, axes: int) -> tuple[Way, ...]:
    """Returns how the plan divides the operator on each axis."""
    return tuple(
        as_way(
            Strategy(
                tuple(each[axis] for each in placements.inputs),
                tuple(R if each is None else each[axis] for each in placements.outputs),
            )
        )
        for axis in range(axes)
    )


def _on_axis(placements: CallPlacements, axis: int) -> tuple[Placement, ...]:
    """The placements of inputs and computed outputs on one axis, and of what is in the middle."""
    given = (*placements.inputs, *(each for each in placements.outputs if each is not None))
    within = R if placements.within is None else placements.within[axis]
    return (*(each[axis] for each in given), within)


def _given(strategy: Strategy, computed: Sequence[bool]) -> tuple[Placement, ...]:
    outputs = (each for each, known in zip(strategy.outputs, computed, strict=True) if known)
    return (*strategy.inputs, *outputs, strategy.within)


def _placements(call: OperatorCall, chosen: Sequence[Strategy]) -> CallPlacements:
    computed = [type_ is not None for type_ in call.operator.outputs]
    outputs = zip(*(each.outputs for each in chosen), strict=True)
    within = tuple(each.within for each in chosen)
    return CallPlacements(
        call.operator.target,
        tuple(zip(*(each.inputs for each in chosen), strict=True)),
        tuple(own if known else None for own, known in zip(outputs, computed, strict=True)),
        within if set(within) != {R} else None,
    )

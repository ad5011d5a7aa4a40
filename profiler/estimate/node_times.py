"""Seconds of the nodes of a model, added up from those of their operators.

BI of a node is what other nodes wait for: the operators that the gradients of its inputs need, and
those that give a buffer a new value. The rest of its backward pass is BW.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from typing import NamedTuple

from pipedream.capture.programs.attribution import Attributed
from pipedream.graph.placements.operators import OperatorCall, OperatorGraph
from pipedream.profiler.estimate.roofline import Roofline


class NodeSeconds(NamedTuple):
    """Of one minibatch; `weight` is the part of `backward` that is BW."""

    forward: float
    backward: float
    weight: float


def call_seconds(graph: OperatorGraph, backward: Set[str], roofline: Roofline) -> dict[str, float]:
    """Returns the seconds of each call by name; `backward`: those of the backward pass."""
    seconds: dict[str, float] = {}
    for way in (False, True):
        calls = [call for call in graph.calls if (call.name in backward) is way]
        taken = roofline.in_passes([call.operator for call in calls], way)
        seconds |= {call.name: own for call, own in zip(calls, taken, strict=True)}
    return seconds


def node_seconds(
    attributed: Attributed, seconds: Mapping[str, float], parts: Mapping[str, float]
) -> dict[str, NodeSeconds]:
    """Returns the seconds of each node that has operators, by its id. `parts`: see
    `weight_parts`.
    """
    forward: dict[str, float] = defaultdict(float)
    backward: dict[str, float] = defaultdict(float)
    weight: dict[str, float] = defaultdict(float)
    for call in attributed.graph.calls:
        node, own = attributed.nodes[call.name], seconds[call.name]
        if call.name in attributed.backward:
            backward[node] += own
            weight[node] += own * parts[call.name]
        else:
            forward[node] += own
    return {
        node: NodeSeconds(forward[node], backward[node], weight[node])
        for node in dict.fromkeys(attributed.nodes.values())
    }


def weight_parts(attributed: Attributed) -> dict[str, float]:
    """Returns the part of each operator of the backward pass that is BW, by the name of its call:
    all, nothing, or half of one that computes several gradients and is cut where passes are.
    """
    waited = _waited_for(attributed)
    return {
        call.name: _part(call, waited)
        for call in attributed.graph.calls
        if call.name in attributed.backward
    }


def _waited_for(attributed: Attributed) -> Set[str]:
    """Returns the values that others than their node need of its backward pass, from the last
    operator back: a value is needed if the model gives it (but for gradients of parameters), if
    another node reads it, or if what is needed is computed from it.
    """
    graph, nodes = attributed.graph, attributed.nodes
    needed = {each.value for each in graph.outputs if each.role != "parameter gradient"}
    maker = {value: call.name for call in graph.calls for value in call.results if value}
    for call in reversed(graph.calls):
        is_needed = bool(call.operator.writes) or not needed.isdisjoint(call.results)
        for value in call.reads:
            if is_needed or (value in maker and nodes[maker[value]] != nodes[call.name]):
                needed.add(value)
    return needed


def _part(call: OperatorCall, waited: Set[str]) -> float:
    if not call.operator.writes and waited.isdisjoint(call.results):
        return 1.0
    if call.operator.family != "aten.convolution_backward":
        return 0.0
    wanted = [value for value in call.results[:2] if value is not None]
    return sum(value not in waited for value in wanted) / max(1, len(wanted))

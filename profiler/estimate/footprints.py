"""Memory of the nodes of a model, from the values that pass between their operators.

As `profiler.memory` and `profiler.timing.backward_split` measure it: what forward operators make
and backward ones read is saved; what BW reads of what others made is kept until then; the most
that a backward pass has allocated is its workspace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipedream.capture.programs.attribution import Attributed
from pipedream.graph.placements.operators import OperatorCall
from pipedream.graph.profile import Footprint
from pipedream.profiler.estimate.work import VIEWS


@dataclass(frozen=True)
class Memory:
    """By node: its footprint, and what its BW keeps after BI."""

    footprints: Mapping[str, Footprint]
    kept: Mapping[str, int]


def memory_of(
    attributed: Attributed,
    input_nodes: Sequence[str],
    nodes: Sequence[str],
    parts: Mapping[str, float],
) -> Memory:
    """Returns the memory of `nodes`. `input_nodes`: those of the model's inputs, in their order;
    `parts`: see `node_times.weight_parts`.
    """
    values = _Values.of(attributed, input_nodes)
    saved, kept = _saved(attributed, values), _kept(attributed, values, parts)
    peaks = _workspaces(attributed, values)
    footprints = {node: Footprint(saved[node], peaks.get(node, 0)) for node in nodes}
    return Memory(footprints, {node: kept[node] for node in nodes})


@dataclass(frozen=True)
class _Values:
    """`base`: the value whose memory each value is. `maker`: the node that allocates it, or
    for which it is drawn, unless it is the model's own.
    """

    base: Mapping[str, str]
    bytes: Mapping[str, int]
    maker: Mapping[str, str]
    backward: frozenset[str]

    @staticmethod
    def of(attributed: Attributed, input_nodes: Sequence[str]) -> _Values:
        graph = attributed.graph
        base = {each.value: each.value for each in graph.inputs}
        given = [each.value for each in graph.inputs if each.role == "input"]
        # The tensors of a target come after the inputs of the model, and belong to no node.
        maker = dict(zip(given, input_nodes, strict=False))
        drawn = {each.value for each in graph.inputs if each.role == "draw"}
        backward = {each.value for each in graph.inputs if each.role == "tangent"}
        for call in graph.calls:
            is_view = call.operator.family in VIEWS
            for value in drawn.intersection(call.reads):
                maker.setdefault(value, attributed.nodes[call.name])
            for value in _made(call):
                base[value] = base[call.reads[0]] if is_view else value
                if not is_view:
                    maker[value] = attributed.nodes[call.name]
                if call.name in attributed.backward:
                    backward.add(value)
        sizes = {value: type_.bytes for value, type_ in graph.types().items()}
        return _Values(base, sizes, maker, frozenset(backward))

    def read_by(self, call: OperatorCall) -> set[str]:
        return {self.base[value] for value in call.reads}


def _saved(attributed: Attributed, values: _Values) -> Counter[str]:
    saved: Counter[str] = Counter()
    counted: set[str] = set()
    for call in attributed.graph.calls:
        if call.name not in attributed.backward:
            continue
        for value in values.read_by(call) - counted - values.backward:
            counted.add(value)
            if value in values.maker:
                saved[values.maker[value]] += values.bytes[value]
    return saved


def _kept(attributed: Attributed, values: _Values, parts: Mapping[str, float]) -> Counter[str]:
    """A value of the forward pass is its maker's, a gradient its reader's. Each counts once."""
    kept: Counter[str] = Counter()
    calls = attributed.graph.calls
    counted = {value for call in calls if parts.get(call.name) == 1.0 for value in _made(call)}
    for call in calls:
        if not parts.get(call.name):
            continue
        for value in values.read_by(call) - counted:
            counted.add(value)
            if value in values.backward:
                kept[attributed.nodes[call.name]] += values.bytes[value]
            elif value in values.maker:
                kept[values.maker[value]] += values.bytes[value]
    return kept


def _workspaces(attributed: Attributed, values: _Values) -> dict[str, int]:
    """Plays the backward pass of each node, which holds the gradients of its outputs throughout: an
    operator allocates its results, and what nobody reads later in the node is freed, if it was
    allocated there and is not given to others.
    """
    calls: dict[str, list[OperatorCall]] = {}
    for call in attributed.graph.calls:
        if call.name in attributed.backward:
            calls.setdefault(attributed.nodes[call.name], []).append(call)
    outside = {values.base[each.value] for each in attributed.graph.outputs}
    for call in attributed.graph.calls:
        node = attributed.nodes[call.name]
        outside |= {v for v in values.read_by(call) if values.maker.get(v, node) != node}
    return {node: _peak(own, values, outside) for node, own in calls.items()}


def _peak(calls: Sequence[OperatorCall], values: _Values, outside: set[str]) -> int:
    made = {value for call in calls for value in _made(call)}
    given = (set().union(*map(values.read_by, calls)) & values.backward) - made
    last = {value: k for k, call in enumerate(calls) for value in values.read_by(call)}
    ending: dict[int, list[str]] = {}
    for value, k in last.items():
        ending.setdefault(k, []).append(value)
    live, held, peak = sum(values.bytes[value] for value in given), set[str](), 0
    for k, call in enumerate(calls):
        for value in _made(call):
            if values.base[value] == value:
                held.add(value)
                live += values.bytes[value]
        peak = max(peak, live)
        for value in ending.get(k, ()):
            if value in held and value not in outside:
                held.remove(value)
                live -= values.bytes[value]
    return peak


def _made(call: OperatorCall) -> Iterator[str]:
    return (value for value in call.results if value is not None)

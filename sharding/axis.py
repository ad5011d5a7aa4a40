"""What there is to decide on one axis of a mesh, the axes before it being decided.

The nodes are the operators' calls and what the graph is given; a strategy of the latter has one
output. A device of the axes before has local operators, which this axis divides.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TypeAlias

from pipedream.graph.placements.operators import (
    Operator,
    OperatorCall,
    OperatorGraph,
    StageInput,
    StageOutput,
    TensorType,
)
from pipedream.graph.placements.placement import (
    Mesh,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
)
from pipedream.graph.placements.regions import local_sizes
from pipedream.sharding.assignment import LinkedMesh, inner_sums, steps_between
from pipedream.sharding.rules import largest_and_smallest, strategies
from pipedream.sharding.rules.strategy import Strategy
from pipedream.sharding.steps import can_be_placed, elements_held

AxisNode: TypeAlias = OperatorCall | StageInput
_MOST_CHUNKS = 4
"""Numbers of chunks that are tried everywhere; those of requests come in addition."""


@dataclass(frozen=True)
class AxisProblem:
    """`mesh` ends with the axis. `placed`, `chosen`: on the axes before it, by value, by call."""

    graph: OperatorGraph
    mesh: LinkedMesh
    placed: Mapping[str, Placements]
    chosen: Mapping[str, tuple[Strategy, ...]]
    requested: frozenset[Placement]
    """On all axes: their numbers of chunks are tried, too."""
    _known: dict[tuple[Operator, tuple[Strategy, ...]], tuple[Strategy, ...]] = field(
        default_factory=dict, init=False
    )

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        locals_ = (
            local_operators(call.operator, self.chosen[call.name], self.mesh.sizes)[0]
            for call in self.graph.calls
        )
        return chunk_numbers(Counter(locals_), self.devices, self.requested)

    @cached_property
    def types(self) -> dict[str, TensorType]:
        return self.graph.types()

    @cached_property
    def nodes(self) -> dict[str, AxisNode]:
        """Lists the nodes in the order of the graph; what is given has the name of its value."""
        nodes: dict[str, AxisNode] = {each.value: each for each in self.graph.inputs}
        return nodes | {call.name: call for call in self.graph.calls}

    @cached_property
    def producers(self) -> dict[str, tuple[str, int]]:
        """Returns for each value the node that gives it, and as which of its outputs."""
        return {
            value: (name, number)
            for name, node in self.nodes.items()
            for number, value in enumerate(results(node))
            if value is not None
        }

    @cached_property
    def readers(self) -> Mapping[str, list[tuple[str, int]]]:
        """Returns for each value the calls that read it, and as which of their inputs."""
        readers: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for call in self.graph.calls:
            for number, value in enumerate(call.reads):
                readers[value].append((call.name, number))
        return readers

    @cached_property
    def outputs(self) -> Mapping[str, list[StageOutput]]:
        outputs: dict[str, list[StageOutput]] = defaultdict(list)
        for output in self.graph.outputs:
            outputs[output.value].append(output)
        return outputs

    @cached_property
    def written(self) -> frozenset[str]:
        """Returns the values that an operator must find as they are (`Operator.stays`)."""
        calls = self.graph.calls
        return frozenset(call.reads[n] for call in calls for n in call.operator.stays)

    @cached_property
    def input_values(self) -> dict[tuple[str, str], str]:
        """Returns the values that the graph is given, by role and name."""
        return {(each.role, each.name): each.value for each in self.graph.inputs}

    @cached_property
    def gradients(self) -> Mapping[str, list[str]]:
        """Maps what the graph is given to the value of its gradient, and back."""
        pairs: dict[str, list[str]] = defaultdict(list)
        for output in self.graph.outputs:
            primal = self.input_values.get((output.role.removesuffix(" gradient"), output.name))
            if primal is not None and output.role != "output":
                pairs[primal].append(output.value)
                pairs[output.value].append(primal)
        return pairs

    def neighbours(self, name: str) -> Iterator[str]:
        """Yields the nodes that give what this one reads, or read what it gives, and from
        parameters and inputs to their gradients and back.
        """
        node = self.nodes[name]
        yield from (self.producers[value][0] for value in reads(node))
        for value in results(node):
            if value is not None:
                yield from (reader for reader, _ in self.readers[value])
                yield from (self.producers[other][0] for other in self.gradients[value])

    def affected(self, name: str) -> tuple[str, ...]:
        """Returns the values whose redistributions depend on the strategy of the node."""
        node = self.nodes[name]
        values = [*reads(node), *(value for value in results(node) if value is not None)]
        if isinstance(node, StageInput):
            values += self.gradients[name]
        return tuple(dict.fromkeys(values))

    def options(self, name: str) -> tuple[Strategy, ...]:
        """Returns the strategies of a node, the replicated one first."""
        node = self.nodes[name]
        if isinstance(node, StageInput):
            return tuple(Strategy((), (each,)) for each in self._given_options(node))
        return self._call_options(node.operator, self.chosen[name])

    def seconds(self, value: str, source: Placements, target: Placements) -> float:
        steps = steps_between(self.types[value], self.mesh, source, target)
        return sum(step.seconds for step in steps)

    def inner_cost(self, name: str, strategy: Strategy) -> tuple[float, int]:
        """Returns seconds and number of the sums in the middle of an operator."""
        node = self.nodes[name]
        if isinstance(node, StageInput) or strategy.within != Partial():
            return 0.0, 0
        sums = inner_sums(node, (*self.chosen[name], strategy), self.mesh)
        return math.fsum(each.seconds for each in sums), len(sums)

    def held_bytes(self, value: str, placement: Placement) -> int:
        """Returns the bytes of the value on the device that holds most."""
        type_, placements = self.types[value], (*self.placed[value], placement)
        return elements_held(type_.shape, self.mesh.sizes, placements) * type_.element_bytes

    @property
    def devices(self) -> int:
        return self.mesh.sizes[-1]

    def _call_options(
        self, operator: Operator, before: tuple[Strategy, ...]
    ) -> tuple[Strategy, ...]:
        """Returns the strategies that all devices of the axes before can follow."""
        key = operator, before
        if key not in self._known:
            first, *others = (
                strategies(local, self.devices, self.chunks)
                for local in local_operators(operator, before, self.mesh.sizes)
            )
            common = [each for each in first if all(each in other for other in others)]
            self._known[key] = tuple(common)
        return self._known[key]

    def _given_options(self, node: StageInput) -> Iterator[Placement]:
        """Random numbers are drawn alike everywhere, and gradients of outputs are as these are."""
        yield Replicate()
        if node.role not in ("parameter", "buffer", "input"):
            return
        before = self.placed[node.value]
        for dim, chunks in product(range(len(node.type.shape)), (1, *self.chunks)):
            size = node.type.shape[dim]
            least = min(local_sizes(size, self.mesh.sizes[:-1], before, dim))
            placement = Shard(dim, chunks)
            if least // chunks >= self.devices and can_be_placed(
                node.type.shape, self.mesh.sizes, (*before, placement)
            ):
                yield placement


def reads(node: AxisNode) -> tuple[str, ...]:
    return node.reads if isinstance(node, OperatorCall) else ()


def results(node: AxisNode) -> tuple[str | None, ...]:
    return node.results if isinstance(node, OperatorCall) else (node.value,)


def local_operators(
    operator: Operator, chosen: tuple[Strategy, ...], mesh: Mesh
) -> tuple[Operator, ...]:
    """Returns the largest and the smallest operator of a device, the first axes divided so."""
    locals_: tuple[Operator, ...] = (operator,)
    for strategy, devices in zip(chosen, mesh, strict=False):
        locals_ = largest_and_smallest(locals_, strategy, devices)
    return locals_


def chunk_numbers(
    operators: Mapping[Operator, int], devices: int, requested: Iterable[Placement]
) -> tuple[int, ...]:
    """Returns the numbers of chunks that are of use: those requested, and those that operators most
    often make of a dimension, or make one of. `operators`: with how often each is called.
    """
    counts: Counter[int] = Counter()
    for operator, calls in operators.items():
        for strategy in strategies(operator, devices):
            numbers = {each.chunks for each in strategy.shards}
            if 1 in numbers:
                counts.update(dict.fromkeys(numbers - {1}, calls))
    frequent = [number for number, _ in counts.most_common(_MOST_CHUNKS)]
    numbers_requested = (each.chunks for each in requested if isinstance(each, Shard))
    return tuple(sorted({*frequent, *numbers_requested} - {1}))

"""How the operators of a graph are divided on a mesh, and what that moves.

A value is redistributed once for each way in which operators read it, however many do. At the end
outputs are replicated, and gradients of inputs are placed as the inputs are. A gradient of a
parameter is placed as the parameter, or stays partial on an axis on which the parameter is whole:
then it is summed only once for all the minibatches of an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import Literal

from pipedream.graph.cluster import Cluster, Link
from pipedream.graph.placements.operators import (
    OperatorCall,
    OperatorGraph,
    StageOutput,
    TensorType,
)
from pipedream.graph.placements.placement import (
    Mesh,
    Partial,
    Placements,
    Replicate,
    axis_groups,
)
from pipedream.sharding.redistribution import redistribute
from pipedream.sharding.rules import summed_types
from pipedream.sharding.rules.strategy import Strategy
from pipedream.sharding.steps import MeshTensor, Step


@dataclass(frozen=True)
class LinkedMesh:
    """A mesh of devices, and for each axis the link between neighbours in a group of the axis."""

    sizes: Mesh
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        assert len(self.links) == len(self.sizes), self

    @staticmethod
    def of(mesh: Mesh, ranks: Sequence[int], cluster: Cluster) -> LinkedMesh:
        """Makes the mesh of these places of a cluster; each axis has its slowest link."""
        levels = (
            max(
                (
                    cluster.level(ranks[a], ranks[b])
                    for g in axis_groups(mesh, axis)
                    for a, b in pairwise(g)
                ),
                default=1,
            )
            for axis in range(len(mesh))
        )
        links = (cluster.mesh_link(k, max(2, n)) for k, n in zip(levels, mesh, strict=True))
        return LinkedMesh(mesh, tuple(links))

    def first(self, axes: int) -> LinkedMesh:
        """Returns the mesh of the first axes alone."""
        return LinkedMesh(self.sizes[:axes], self.links[:axes])


@dataclass(frozen=True)
class Assignment:
    """Holds a strategy of each operator for each axis of the mesh."""

    graph: OperatorGraph
    mesh: LinkedMesh
    strategies: Mapping[str, tuple[Strategy, ...]]
    """By the name of the call, for each axis."""
    placed: Mapping[str, Placements]
    """Of each value, as its operator gives it or as the graph is given it."""

    def targets(self, call: str) -> tuple[Placements, ...]:
        """Returns how the operator wants each of the values that it reads."""
        by_axis = (strategy.inputs for strategy in self.strategies[call])
        return tuple(zip(*by_axis, strict=True))

    @cached_property
    def placed_inputs(self) -> Mapping[tuple[str, str], Placements]:
        """Returns the placements of what the graph is given, by role and name."""
        return {(each.role, each.name): self.placed[each.value] for each in self.graph.inputs}


@dataclass(frozen=True)
class Redistribution:
    """A value that is brought from one placement to another."""

    value: str
    """Its name; of what is added up in the middle of an operator the name of the call."""
    source: Placements
    target: Placements
    steps: tuple[Step, ...]
    often: Literal["minibatch", "update"]
    """How often: for each minibatch, or once for all that an update is made of."""

    @property
    def bytes(self) -> int:
        """Counts the bytes that the busiest device of each step sends or receives."""
        return sum(step.bytes for step in self.steps)

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)


def redistributions(assignment: Assignment) -> tuple[Redistribution, ...]:
    """Returns all redistributions: first what operators read, in their order, then outputs, then
    sums of gradients, then what operators add up in their middle.

    A value is brought to a placement once, whoever reads it there; gradients are added up for each
    parameter. Those that need no communication, such as a slice, are among them.
    """
    distinct: dict[tuple[str, Placements, str | None], Redistribution] = {}
    types = assignment.graph.types()
    for value, target, parameter in _wanted(assignment):
        source = assignment.placed[value]
        if parameter is not None:
            source = _gradient_target(source, target)
        if source != target:
            steps = steps_between(types[value], assignment.mesh, source, target)
            often: Literal["minibatch", "update"] = "minibatch" if parameter is None else "update"
            key = value, target, parameter
            distinct.setdefault(key, Redistribution(value, source, target, steps, often))
    inner = (
        inner_sums(call, assignment.strategies[call.name], assignment.mesh)
        for call in assignment.graph.calls
    )
    return (*distinct.values(), *chain.from_iterable(inner))


def inner_sums(
    call: OperatorCall, strategies: Iterable[Strategy], mesh: LinkedMesh
) -> tuple[Redistribution, ...]:
    """Returns the redistributions that add up what devices have in the operator's middle."""
    source = tuple(each.within for each in strategies)
    target = tuple(Replicate() if each == Partial() else each for each in source)
    if source == target:
        return ()
    types = summed_types(call.operator)
    steps = (steps_between(type_, mesh, source, target) for type_ in types)
    return tuple(Redistribution(call.name, source, target, each, "minibatch") for each in steps)


@lru_cache(maxsize=200_000)
def steps_between(
    type_: TensorType, mesh: LinkedMesh, source: Placements, target: Placements
) -> tuple[Step, ...]:
    tensor = MeshTensor(type_.shape, type_.element_bytes, mesh.sizes, mesh.links)
    return redistribute(tensor, source, target)


def output_target(
    output: StageOutput, placed: Placements, inputs: Mapping[tuple[str, str], Placements]
) -> Placements:
    """Returns how a value is to be placed at the end of the graph. `inputs`: the placements of what
    the graph is given, by role and name.
    """
    if output.role == "input gradient":
        return inputs["input", output.name]
    if output.role == "parameter gradient":
        return _gradient_target(placed, inputs["parameter", output.name])
    return (Replicate(),) * len(placed)


def _gradient_target(placed: Placements, parameter: Placements) -> Placements:
    """Returns a gradient's placement: partial stays where the parameter is whole, else its own."""
    pairs = zip(placed, parameter, strict=True)
    partial, whole = Partial(), Replicate()
    return tuple(source if (source, its) == (partial, whole) else its for source, its in pairs)


def _wanted(assignment: Assignment) -> Iterator[tuple[str, Placements, str | None]]:
    """Yields values and where they go, with the parameter whose gradient is added up there."""
    for call in assignment.graph.calls:
        for value, target in zip(call.reads, assignment.targets(call.name), strict=True):
            yield value, target, None
    inputs = assignment.placed_inputs
    outputs = assignment.graph.outputs
    for output in outputs:
        placed = assignment.placed[output.value]
        yield output.value, output_target(output, placed, inputs), None
    for output in outputs:
        if output.role == "parameter gradient":
            yield output.value, inputs["parameter", output.name], output.name

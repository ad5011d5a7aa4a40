"""The labels of operators, and of what a graph is given: their strategies on all axes at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TypeAlias

import numpy as np

from pipedream.graph.placements.operators import (
    Operator,
    OperatorGraph,
    StageInput,
    TensorType,
)
from pipedream.graph.placements.placement import Mesh, Placement, Placements, Replicate, Shard
from pipedream.optimizer.intra.solver.problem import Ints
from pipedream.sharding.axis import local_operators
from pipedream.sharding.rules import strategies
from pipedream.sharding.rules.strategy import Strategy
from pipedream.sharding.steps import can_be_placed

MOST_CHUNKS = 4
"""Numbers of chunks that are tried; those of requests come in addition."""

JointStrategy: TypeAlias = tuple[Strategy, ...]
"""One for each axis of the mesh; each divides what those before it left."""

Part: TypeAlias = tuple[int, int]
"""The size of a dimension, and into how many chunks operators cut it."""


@dataclass(frozen=True, eq=False)
class Places:
    """The placements that labels give to one tensor: `number[label]` among the `distinct`."""

    distinct: tuple[Placements, ...]
    number: Ints

    @staticmethod
    def of(placements: Iterable[Placements]) -> Places:
        distinct: dict[Placements, int] = {}
        number = [distinct.setdefault(each, len(distinct)) for each in placements]
        return Places(tuple(distinct), np.array(number, dtype=np.intp))


@dataclass(frozen=True, eq=False)
class OperatorLabels:
    """The joint strategies of an operator, that which divides nothing first."""

    strategies: tuple[JointStrategy, ...]

    @cached_property
    def inputs(self) -> tuple[Places, ...]:
        return _places([[each.inputs for each in joint] for joint in self.strategies])

    @cached_property
    def outputs(self) -> tuple[Places, ...]:
        return _places([[each.outputs for each in joint] for joint in self.strategies])

    def only(self, kept: Sequence[bool]) -> OperatorLabels:
        """Some of them."""
        pairs = zip(self.strategies, kept, strict=True)
        return OperatorLabels(tuple(each for each, own in pairs if own))


class Labels:
    """Makes the labels of all operators on a mesh, once for each distinct operator.

    `requested`: placements whose numbers of chunks are tried, too.
    """

    def __init__(
        self, graph: OperatorGraph, mesh: Mesh, requested: Iterable[Placement] = ()
    ) -> None:
        self.mesh = mesh
        self._known: dict[Operator, OperatorLabels] = {}
        operators = list(dict.fromkeys(call.operator for call in graph.calls))
        parts = _parts(operators, mesh)
        counts = Counter(chunks for _, chunks in parts)
        frequent = {chunks for chunks, _ in counts.most_common(MOST_CHUNKS)}
        asked = {each.chunks for each in requested if isinstance(each, Shard)}
        self.chunks = tuple(sorted((frequent | asked) - {1}))
        self.parts = frozenset(part for part in parts if part[1] in self.chunks)
        self.asked = frozenset(asked)

    def of_call(self, operator: Operator) -> OperatorLabels:
        if operator not in self._known:
            self._known[operator] = OperatorLabels(tuple(self._joint(operator)))
        return self._known[operator]

    def of_input(self, given: StageInput) -> tuple[Placements, ...]:
        """The placements in which the graph can be given a parameter or a buffer, whole first.
        Whatever else it is given comes whole: drawn numbers and minibatches are read on each
        device, and a slice is free.
        """
        whole = (Replicate(),) * len(self.mesh)
        if given.role not in ("parameter", "buffer"):
            return (whole,)
        choices: list[Placement] = [Replicate()]
        for dim, size in enumerate(given.type.shape):
            chunks = (n for n in self.chunks if (size, n) in self.parts or n in self.asked)
            choices += (Shard(dim, number) for number in (1, *chunks))
        joint = product(choices, repeat=len(self.mesh))
        return tuple(each for each in joint if self._has_parts(given.type, each))

    def _has_parts(self, type_: TensorType, placements: Placements) -> bool:
        """Whether all devices have some elements."""
        sizes = list(type_.shape)
        for size, each in zip(self.mesh, placements, strict=True):
            if isinstance(each, Shard):
                if sizes[each.dim] % each.chunks or sizes[each.dim] // each.chunks < size:
                    return False
                sizes[each.dim] = sizes[each.dim] // each.chunks // size * each.chunks
        return can_be_placed(type_.shape, self.mesh, placements)

    def _joint(self, operator: Operator) -> Iterator[JointStrategy]:
        before: list[JointStrategy] = [()]
        for axis in range(len(self.mesh)):
            before = [(*own, each) for own in before for each in self._further(operator, own, axis)]
        types = (*operator.inputs, *operator.outputs)
        seen = set[tuple[Placements, ...]]()
        for joint in before:
            ends = tuple(zip(*((*each.inputs, *each.outputs) for each in joint), strict=True))
            possible = (
                type_ is None or can_be_placed(type_.shape, self.mesh, placements)
                for type_, placements in zip(types, ends, strict=True)
            )
            if all(possible) and ends not in seen:
                seen.add(ends)
                yield joint

    def _further(self, operator: Operator, before: JointStrategy, axis: int) -> Iterator[Strategy]:
        """The strategies on the axis that all devices of those before it can follow."""
        devices = self.mesh[axis]
        first, *others = local_operators(operator, before, self.mesh)
        alike = [set(strategies(each, devices, self.chunks)) for each in others]
        for each in strategies(first, devices, self.chunks):
            if all(each in own for own in alike) and self._is_of_use(first, each, axis):
                yield each

    def _is_of_use(self, local: Operator, strategy: Strategy, axis: int) -> bool:
        """Whether chunks are such as operators cut a dimension of this size into."""
        pairs = zip(
            (*local.inputs, *local.outputs), (*strategy.inputs, *strategy.outputs), strict=True
        )
        divisors = {1}
        for size in self.mesh[:axis]:
            divisors |= {each * size for each in divisors}
        return all(
            each.chunks == 1
            or each.chunks in self.asked
            or any((type_.shape[each.dim] * by, each.chunks) in self.parts for by in divisors)
            for type_, each in pairs
            if type_ is not None and isinstance(each, Shard)
        )


def _places(by_label: Sequence[Sequence[Placements]]) -> tuple[Places, ...]:
    """Of each tensor, from the placements [label][axis][tensor]."""
    by_tensor = zip(*(zip(*joint, strict=True) for joint in by_label), strict=True)
    return tuple(Places.of(placements) for placements in by_tensor)


def _parts(operators: Iterable[Operator], mesh: Mesh) -> Iterable[Part]:
    """What operators cut in chunks, each as often as it does."""
    found = list[Part]()
    for operator in operators:
        types = (*operator.inputs, *operator.outputs)
        for strategy in strategies(operator, max(mesh)):
            for type_, each in zip(types, (*strategy.inputs, *strategy.outputs), strict=True):
                if type_ is not None and isinstance(each, Shard) and each.chunks > 1:
                    found.append((type_.shape[each.dim], each.chunks))
    return found

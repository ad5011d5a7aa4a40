"""The graph as arrays, and in which order its operators are decided.

Nodes are what the graph is given and then the calls, as in `sharding.axis`; what is given reads
nothing and has one result. Heavy operators are those that have `flops`, heaviest first; each is
followed by the light ones to which no other heavy one is nearer, the nearest first. Those that only
prepare a gradient of a parameter come after the heavy ones that give it, which can choose; those
that read what another changes in place, after that one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from pipedream.graph.placements.operators import (
    Operator,
    OperatorCall,
    OperatorGraph,
    flops,
)
from pipedream.graph.placements.placement import Partial, Shard
from pipedream.optimizer.recursive.options import Ints
from pipedream.sharding.axis import AxisNode, reads, results
from pipedream.sharding.rules import strategies

OUTPUT, INPUT_GRADIENT, PARAMETER_GRADIENT = range(3)
_KINDS = {
    "output": OUTPUT,
    "input gradient": INPUT_GRADIENT,
    "parameter gradient": PARAMETER_GRADIENT,
}


class Lists(NamedTuple):
    """Many lists in one array: list k is `items[begin[k] : begin[k + 1]]`."""

    begin: Ints
    items: Ints

    @staticmethod
    def of(lists: Iterable[Sequence[int]]) -> Lists:
        rows = list(lists)
        begin = np.array(list(accumulate(map(len, rows), initial=0)), np.int64)
        return Lists(begin, np.array([item for row in rows for item in row], np.int64))


class GraphArrays(NamedTuple):
    """Nodes and values by number. A slot is the number of an input, or after these of an output."""

    reads: Lists
    """By node: values."""
    results: Lists
    """By node: values; -1 for one that nobody reads."""
    producers: Ints
    """By value: the node that gives it."""
    slots: Ints
    """By value: as which of that node's slots."""
    ends: Lists
    """By value: the kinds of outputs of the graph that it is."""
    partners: Ints
    """For each of these: the value of the parameter or input whose gradient it is; else -1."""
    gradients: Lists
    """By value that is given: those of its gradients."""
    gradient_kinds: Ints
    """For each of these."""
    written: Ints
    """By value: whether an operator must find it as it is."""
    late: Ints
    """By value: the parameter for whose gradient it is made, and for nothing else, so that its sums
    can wait until there is an update; -1 for all others.
    """
    indices: Ints
    """By value and dimension: what is the same where dividing one divides the other."""
    heavy: Ints
    """By node: its number among the heavy ones in their order in the graph; else -1."""
    family: Ints
    """By node: the products over the same indices, such as one and those that give its gradients;
    -1 for what is no product.
    """
    family_indices: Lists
    """By family."""
    near: Lists
    """By node: those that give what it reads, read what it gives, or give the gradient of what it
    is, and back.
    """


@dataclass(frozen=True)
class HalvingGraph:
    graph: OperatorGraph

    @cached_property
    def nodes(self) -> tuple[AxisNode, ...]:
        return *self.graph.inputs, *self.graph.calls

    @cached_property
    def values(self) -> dict[str, int]:
        """The number of each value."""
        names = (value for node in self.nodes for value in results(node) if value is not None)
        return {name: number for number, name in enumerate(names)}

    @cached_property
    def operators(self) -> tuple[Operator, ...]:
        """By call: one object for all calls of an operator."""
        distinct: dict[Operator, Operator] = {}
        return tuple(distinct.setdefault(c.operator, c.operator) for c in self.graph.calls)

    @cached_property
    def heavy(self) -> dict[int, float]:
        """The flops of the nodes that have some, heaviest first."""
        counts = {operator: flops(operator) for operator in dict.fromkeys(self.operators)}
        first = len(self.graph.inputs)
        found = {first + k: counts[each] for k, each in enumerate(self.operators) if counts[each]}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @cached_property
    def arrays(self) -> GraphArrays:
        number, count = self.values, len(self.values)
        read = [[number[value] for value in reads(node)] for node in self.nodes]
        result = [
            [-1 if value is None else number[value] for value in results(node)]
            for node in self.nodes
        ]
        producers, slots = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for node, values in enumerate(result):
            for slot, value in enumerate(values):
                if value >= 0:
                    producers[value], slots[value] = node, len(read[node]) + slot
        ends: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        gradients: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        given: dict[tuple[str, str], int]
        given = {(each.role, each.name): number[each.value] for each in self.graph.inputs}
        for output in self.graph.outputs:
            value, kind = number[output.value], _KINDS[output.role]
            partner = given.get((output.role.removesuffix(" gradient"), output.name), -1)
            partner = -1 if kind == OUTPUT else partner
            ends[value].append((kind, partner))
            if partner >= 0:
                gradients[partner].append((value, kind))
        family, family_indices = self._families
        written = np.zeros(count, np.int64)
        for call in self.graph.calls:
            written[[number[call.reads[n]] for n in call.operator.stays]] = 1
        return GraphArrays(
            Lists.of(read),
            Lists.of(result),
            producers,
            slots,
            Lists.of([[kind for kind, _ in each] for each in ends]),
            np.array([partner for each in ends for _, partner in each], np.int64),
            Lists.of([[value for value, _ in each] for each in gradients]),
            np.array([kind for each in gradients for _, kind in each], np.int64),
            written,
            self._late,
            self._indices,
            np.where(family >= 0, np.cumsum(family >= 0) - 1, -1),
            family,
            family_indices,
            Lists.of(self._neighbours),
        )

    @cached_property
    def _before(self) -> list[set[int]]:
        """By node others that are decided before it: what is changed in place stays where the
        operator that does it needs it, and others read it there.
        """
        before: list[set[int]] = [set() for _ in self.nodes]
        written = {call.reads[n]: call for call in self.graph.calls for n in call.operator.writes}
        given = {each.value: node for node, each in enumerate(self.graph.inputs)}
        for node, each in enumerate(self.graph.calls, len(given)):
            for value in each.reads:
                if value in written and value in given:
                    writes = written[value] is each
                    one, other = (node, given[value]) if writes else (given[value], node)
                    before[other].add(one)
        return before

    @cached_property
    def _late_nodes(self) -> frozenset[int]:
        """Those that give late values alone."""
        values = self.values
        return frozenset(
            node
            for node, each in enumerate(self.nodes)
            if all(v is None or self._late[values[v]] >= 0 for v in results(each))
        )

    @cached_property
    def _late(self) -> Ints:
        """late(v) = p if v is the gradient of p, or all that reads v passes on sums and gives what
        is late; and nothing else ends in v.
        """
        given = {(each.role, each.name): each.value for each in self.graph.inputs}
        passing = {each for each in dict.fromkeys(self.operators) if _passes_on_sums(each)}
        late: dict[str, int] = {}
        for output in self.graph.outputs:
            own = (
                self.values[given["parameter", output.name]]
                if output.role == "parameter gradient"
                else -1
            )
            late[output.value] = min(own, late.get(output.value, own))
        for call in reversed(self.graph.calls):
            made = [late[value] for value in call.results if value in late]
            own = min(made) if made and call.operator in passing else -1
            late |= {value: min(own, late.get(value, own)) for value in call.reads}
        return np.array([late.get(value, -1) for value in self.values], np.int64)

    @cached_property
    def order(self) -> Ints:
        """The nodes in the order in which they are decided; those far from all heavy ones last."""
        rank = {heavy: number for number, heavy in enumerate(self.heavy)}
        nearest, reached = dict(rank), list(rank)
        for node in reached:  # which grows: all heavy ones flood at once
            for near in self._neighbours[node]:
                too_early = near in self._late_nodes and node not in self._late_nodes
                if near not in nearest and not too_early:
                    nearest[near] = nearest[node]
                    reached.append(near)
        reached.sort(key=lambda node: nearest[node])  # by distance where that is equal
        calls = range(len(self.graph.inputs), len(self.nodes))
        order: dict[int, None] = {}
        for node in (*reached, *calls, *range(len(self.graph.inputs))):
            order |= dict.fromkeys(self._first(node))
        return np.array(list(order), np.int64)

    def _first(self, node: int) -> Iterator[int]:
        """The node, after those that are decided before it."""
        for other in sorted(self._before[node]):
            yield from self._first(other)
        yield node

    @cached_property
    def _neighbours(self) -> list[list[int]]:
        """As `GraphArrays.near`."""
        near: list[list[int]] = [[] for _ in self.nodes]
        producer = {v: n for n, node in enumerate(self.nodes) for v in results(node)}
        given: dict[tuple[str, str], int]
        given = {(e.role, e.name): k for k, e in enumerate(self.graph.inputs)}
        pairs = [(n, producer[v]) for n, node in enumerate(self.nodes) for v in reads(node)]
        for output in self.graph.outputs:
            primal = given.get((output.role.removesuffix(" gradient"), output.name))
            if primal is not None and output.role != "output":
                pairs.append((primal, producer[output.value]))
        for one, other in pairs:
            near[one].append(other)
            near[other].append(one)
        return near

    @cached_property
    def _roots(self) -> dict[tuple[int, int], int]:
        """By value and dimension the number of its index. Products relate the dimensions of what
        they read and give, and so do operators that read one computed value; others, such as the
        sum of two branches, would make one index of what each of them can divide otherwise.
        """
        parent: dict[tuple[int, int], tuple[int, int]] = {}

        def root(place: tuple[int, int]) -> tuple[int, int]:
            while (above := parent.setdefault(place, place)) != place:
                parent[place] = place = parent.setdefault(above, above)
            return place

        for call, values, groups in self._groups():
            if flops(call.operator) or self._reads_one(call):
                for first, *others in groups:
                    for slot, dim in others:
                        parent[root((values[slot], dim))] = root((values[first[0]], first[1]))
        numbers: dict[tuple[int, int], int] = defaultdict(lambda: len(numbers))
        return {place: numbers[root(place)] for place in list(parent)}

    def _groups(self) -> Iterator[tuple[OperatorCall, list[int], list[list[tuple[int, int]]]]]:
        """Yields the calls, the values of their slots, and for each strategy the dimensions that it
        shards.
        """
        of_operator = {each: _sharded(each) for each in dict.fromkeys(self.operators)}
        for call, operator in zip(self.graph.calls, self.operators, strict=True):
            values = [self.values.get(v or "", -1) for v in (*call.reads, *call.results)]
            groups = [[e for e in g if values[e[0]] >= 0] for g in of_operator[operator]]
            yield call, values, [each for each in groups if each]

    def _reads_one(self, call: OperatorCall) -> bool:
        return sum(value not in self._given for value in dict.fromkeys(call.reads)) <= 1

    @cached_property
    def _given(self) -> frozenset[str]:
        return frozenset(each.value for each in self.graph.inputs)

    @cached_property
    def _indices(self) -> Ints:
        dims = max((len(type_.shape) for type_ in self.graph.types().values()), default=0)
        indices = np.full((len(self.values), max(1, dims)), -1, np.int64)
        for (value, dim), index in self._roots.items():
            indices[value, dim] = index
        return indices

    @cached_property
    def _families(self) -> tuple[Ints, Lists]:
        families: dict[frozenset[int], int] = {}
        family = np.full(len(self.nodes), -1, np.int64)
        for node, (_, values, groups) in enumerate(self._groups(), len(self.graph.inputs)):
            if node in self.heavy:
                places = {(values[slot], dim) for group in groups for slot, dim in group}
                indices = frozenset(self._roots[each] for each in places)
                family[node] = families.setdefault(indices, len(families))
        return family, Lists.of([sorted(each) for each in families] or [[]])


def _sharded(operator: Operator) -> list[list[tuple[int, int]]]:
    """Returns for each strategy on two devices the slots that it shards, with their dimensions."""
    found = []
    for strategy in strategies(operator, 2):
        ends = enumerate((*strategy.inputs, *strategy.outputs))
        found.append([(slot, each.dim) for slot, each in ends if isinstance(each, Shard)])
    return [each for each in found if each]


def _passes_on_sums(operator: Operator) -> bool:
    """Tells whether terms of all that it reads give terms of its results."""
    return any(
        all(isinstance(each, Partial) for each in (*strategy.inputs, *strategy.outputs))
        for strategy in strategies(operator, 2)
    )

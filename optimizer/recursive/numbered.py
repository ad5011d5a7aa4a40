"""A graph with numbers in place of names.

Nodes are what the graph is given and then the calls, as in `sharding.axis`; what is given reads
nothing and has one result. A slot is the number of an input of an operator, or after these of an
output. What depends on an operator alone is looked at once for all its calls, and what depends on a
call in arrays of all of them: a model has thousands of calls of some hundred operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from pipedream.graph.placements.operators import Operator, OperatorGraph
from pipedream.optimizer.recursive.options import Floats, Ints

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
    def of(counts: Ints, items: Sequence[int] | Ints) -> Lists:
        """`counts`: how many items each list has; `items`: those of all."""
        return Lists(np.append(0, np.cumsum(counts)), np.asarray(items, np.int64))

    @staticmethod
    def keyed(keys: Sequence[int] | Ints, items: Sequence[int] | Ints, count: int) -> Lists:
        """Puts each item into the list of its key, which is less than `count`, in their order."""
        of_item = np.asarray(keys, np.int64)
        order = np.argsort(of_item, kind="stable")
        return Lists.of(np.bincount(of_item, minlength=count), np.asarray(items, np.int64)[order])

    @property
    def owners(self) -> Ints:
        """By item: the list that it is in."""
        return np.repeat(np.arange(len(self.begin) - 1), np.diff(self.begin))

    @property
    def places(self) -> Ints:
        """By item: its place in its list."""
        return np.arange(len(self.items)) - self.begin[self.owners]


class Ends(NamedTuple):
    """The outputs of the graph, in their order."""

    values: Ints
    kinds: Ints
    partners: Ints
    """For each: the value of the parameter or input whose gradient it is; else -1."""


class Alike(NamedTuple):
    """Calls of one operator that lack the same results."""

    operator: int
    nodes: Ints
    values: Ints
    """By call and slot; -1 for a result that nobody reads."""


@dataclass(frozen=True)
class NumberedGraph:
    graph: OperatorGraph

    @cached_property
    def values(self) -> dict[str, int]:
        """The number of each value; what is given has the number of its node."""
        given = [each.value for each in self.graph.inputs]
        names = [*given, *filter(None, self._call_results)]
        return dict(zip(names, range(len(names)), strict=True))

    @cached_property
    def _call_results(self) -> tuple[str | None, ...]:
        return tuple(chain.from_iterable([call.results for call in self.graph.calls]))

    @cached_property
    def _distinct(self) -> tuple[tuple[Operator, ...], Ints]:
        """The operators, and by call the number of its own."""
        called = [call.operator for call in self.graph.calls]
        objects = dict(zip(map(id, called), called, strict=True))  # equal ones are slow to find
        numbers: dict[Operator, int] = {}
        number = {key: numbers.setdefault(each, len(numbers)) for key, each in objects.items()}
        of_call = map(number.__getitem__, map(id, called))
        return tuple(numbers), np.fromiter(of_call, np.int64, len(called))

    @property
    def operators(self) -> tuple[Operator, ...]:
        return self._distinct[0]

    @property
    def of_call(self) -> Ints:
        """By call: the number of its operator."""
        return self._distinct[1]

    @property
    def nodes(self) -> int:
        return len(self.graph.inputs) + len(self.graph.calls)

    def by_node(self, by_operator: Iterable[float]) -> Floats:
        """By node what its operator has; 0 of what is given."""
        of_calls = np.array(list(by_operator), np.float64)[self.of_call]
        return np.append(np.zeros(len(self.graph.inputs)), of_calls)

    @cached_property
    def reads(self) -> Lists:
        counts = self.by_node(len(each.inputs) for each in self.operators).astype(np.int64)
        values = chain.from_iterable([call.reads for call in self.graph.calls])
        read = map(self.values.__getitem__, values)
        return Lists.of(counts, np.fromiter(read, np.int64, int(counts.sum())))

    @cached_property
    def results(self) -> Lists:
        given = len(self.graph.inputs)
        counts = self.by_node(len(each.outputs) for each in self.operators).astype(np.int64)
        counts[:given] = 1
        is_given = np.array([True] * given + [each is not None for each in self._call_results])
        return Lists.of(counts, np.where(is_given, np.cumsum(is_given) - 1, -1))

    @cached_property
    def producers(self) -> Ints:
        results, producers = self.results, np.zeros(len(self.values), np.int64)
        given = results.items >= 0
        producers[results.items[given]] = results.owners[given]
        return producers

    @cached_property
    def slots(self) -> Ints:
        """By value: as which slot its producer gives it."""
        results, slots = self.results, np.zeros(len(self.values), np.int64)
        given, reads = results.items >= 0, np.diff(self.reads.begin)
        slots[results.items[given]] = (reads[results.owners] + results.places)[given]
        return slots

    @cached_property
    def ends(self) -> Ends:
        given: dict[tuple[str, str], int]
        given = {(each.role, each.name): node for node, each in enumerate(self.graph.inputs)}
        values, kinds, partners = [], [], []
        for output in self.graph.outputs:
            role = output.role.removesuffix(" gradient")
            values.append(self.values[output.value])
            kinds.append(_KINDS[output.role])
            partners.append(given.get((role, output.name), -1) if role != "output" else -1)
        return Ends(*(np.array(each, np.int64) for each in (values, kinds, partners)))

    @cached_property
    def alike(self) -> tuple[Alike, ...]:
        given, which = len(self.graph.inputs), self.of_call.copy()
        lacking: dict[tuple[int, ...], int] = {}
        for call in np.unique(self.results.owners[self.results.items < 0]) - given:
            lacks = (each is None for each in self.graph.calls[call].results)
            own = lacking.setdefault((int(which[call]), *lacks), len(lacking))
            which[call] = len(self.operators) + own
        calls = Lists.keyed(which, np.arange(given, self.nodes), which.max(initial=-1) + 1)
        pairs = zip(calls.begin[:-1], calls.begin[1:], strict=True)
        return tuple(self._values_of(calls.items[b:e]) for b, e in pairs if b < e)

    def _values_of(self, nodes: Ints) -> Alike:
        """`nodes`: calls of one operator."""
        operator, values = int(self.of_call[nodes[0] - len(self.graph.inputs)]), []
        for each, count in (
            (self.reads, len(self.operators[operator].inputs)),
            (self.results, len(self.operators[operator].outputs)),
        ):
            values.append(each.items[each.begin[nodes][:, None] + np.arange(count)])
        return Alike(operator, nodes, np.concatenate(values, axis=1))

    @cached_property
    def dims(self) -> int:
        types = chain(
            (each.type for each in self.graph.inputs),
            chain.from_iterable(each.outputs for each in self.operators),
        )
        return max((len(each.shape) for each in types if each is not None), default=0) or 1

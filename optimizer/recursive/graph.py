"""The graph as arrays, and in which order its operators are decided.

Heavy operators are those that have `flops`, heaviest first; each is followed by the light ones to
which no other heavy one is nearer, the nearest first. Those that only prepare a gradient of a
parameter come after the heavy ones that give it, which can choose; those that read what another
changes in place, after that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from pipedream.graph.placements.operators import Operator, flops
from pipedream.graph.placements.placement import Partial, Shard
from pipedream.optimizer.recursive.numbered import PARAMETER_GRADIENT, Lists, NumberedGraph
from pipedream.optimizer.recursive.options import Ints
from pipedream.sharding.rules import strategies

_Place: TypeAlias = tuple[int, int]
"""A slot of an operator, and one of its dimensions."""
_OPEN = np.iinfo(np.int64).max


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
class HalvingGraph(NumberedGraph):
    @cached_property
    def heavy(self) -> Ints:
        """The nodes that have flops, those with most of them first."""
        counts = self.by_node([flops(each) for each in self.operators])
        heavy = np.flatnonzero(counts)
        return heavy[np.argsort(-counts[heavy], kind="stable")]

    @cached_property
    def arrays(self) -> GraphArrays:
        count, (ends, kinds, partners) = len(self.values), self.ends
        paired = np.flatnonzero(partners >= 0)
        family, family_indices = self._families
        return GraphArrays(
            self.reads,
            self.results,
            self.producers,
            self.slots,
            Lists.keyed(ends, kinds, count),
            Lists.keyed(ends, partners, count).items,
            Lists.keyed(partners[paired], ends[paired], count),
            Lists.keyed(partners[paired], kinds[paired], count).items,
            self._written,
            self._late,
            self._indices,
            np.where(family >= 0, np.cumsum(family >= 0) - 1, -1),
            family,
            family_indices,
            self._neighbours,
        )

    @cached_property
    def order(self) -> Ints:
        """The nodes in the order in which they are decided; those far from all heavy ones last."""
        late = (self.results.items < 0) | (self._late[self.results.items] >= 0)
        in_time = np.bincount(self.results.owners[~late], minlength=self.nodes) > 0
        near = self._neighbours
        reached, nearest = _flood(near.begin, near.items, self.heavy, in_time)
        reached = reached[np.argsort(nearest, kind="stable")]  # by distance where that is equal
        inputs = len(self.graph.inputs)
        order: dict[int, None] = {}
        for node in (*reached.tolist(), *range(inputs, self.nodes), *range(inputs)):
            if node in self._before:
                order |= dict.fromkeys(self._first(node))
            order[node] = None
        return np.array(list(order), np.int64)

    def _first(self, node: int) -> Iterator[int]:
        """The node, after those that are decided before it."""
        for other in sorted(self._before.get(node, ())):
            yield from self._first(other)
        yield node

    @cached_property
    def _written(self) -> Ints:
        written = np.zeros(len(self.values), np.int64)
        for calls in self.alike:
            written[calls.values[:, list(self.operators[calls.operator].stays)]] = 1
        return written

    @cached_property
    def _before(self) -> dict[int, set[int]]:
        """By node others that are decided before it: what is changed in place stays where the
        operator that does it needs it, and others read it there.
        """
        writer: dict[int, int] = {}
        for calls in self.alike:
            for slot in self.operators[calls.operator].writes:
                written = calls.values[:, slot].tolist()
                for value, node in zip(written, calls.nodes.tolist(), strict=True):
                    writer[value] = max(node, writer.get(value, -1))
        given = {value for value in writer if value < len(self.graph.inputs)}
        before: dict[int, set[int]] = {}
        for k in np.flatnonzero(np.isin(self.reads.items, list(given))):
            node, value = int(self.reads.owners[k]), int(self.reads.items[k])
            one, other = (node, value) if writer[value] == node else (value, node)
            before.setdefault(other, set()).add(one)
        return before

    @cached_property
    def _late(self) -> Ints:
        """As `GraphArrays.late`."""
        ends, kinds, partners = self.ends
        late = np.full(len(self.values), _OPEN)
        np.minimum.at(late, ends, np.where(kinds == PARAMETER_GRADIENT, partners, -1))
        passing = self.by_node(_passes_on_sums(each) for each in self.operators) > 0
        _pass_back(*self.reads, *self.results, passing, late)
        return np.where(late == _OPEN, -1, late)

    @cached_property
    def _neighbours(self) -> Lists:
        """As `GraphArrays.near`."""
        ends, _, partners = self.ends
        paired = partners >= 0
        one = np.append(self.reads.owners, partners[paired])
        other = self.producers[np.append(self.reads.items, ends[paired])]
        both = np.stack((one, other), axis=1)
        return Lists.keyed(both.reshape(-1), both[:, ::-1].reshape(-1), self.nodes)

    @cached_property
    def _sharded(self) -> list[list[list[_Place]]]:
        return [_sharded(each) for each in self.operators]

    @cached_property
    def _indices(self) -> Ints:
        """By value and dimension. Products relate the dimensions of what they read and give, and so
        do operators that read one computed value; others, such as the sum of two branches, would
        make one index of what each of them can divide otherwise.
        """
        pairs = [np.zeros((2, 0), np.int64)]
        for calls in self.alike:
            own, related = self.operators[calls.operator], calls.values
            if not flops(own):
                related = related[self._read_one(related[:, : len(own.inputs)])]
            groups = [_there(related, each) for each in self._sharded[calls.operator]]
            ends = [(group[0], each) for group in groups for each in group[1:]]
            both = (_places(related, each, self.dims) for each in zip(*ends, strict=True))
            pairs += [np.stack([each.reshape(-1) for each in both])] if ends else []
        related, size = np.concatenate(pairs, axis=1), len(self.values) * self.dims
        joined = coo_array((np.ones(related.shape[1]), related), (size, size))
        labels = connected_components(joined, directed=False)[1]
        indices = np.full(size, -1, np.int64)
        indices[related] = labels[related]
        return indices.reshape(len(self.values), self.dims)

    def _read_one(self, read: Ints) -> NDArray[np.bool_]:
        """Tells of each call whether it reads one computed value at most. `read`: by call."""
        computed = read >= len(self.graph.inputs)
        most = np.where(computed, read, -1).max(axis=1, initial=-1)
        least = np.where(computed, read, _OPEN).min(axis=1, initial=_OPEN)
        return np.asarray(most <= least)

    @cached_property
    def _families(self) -> tuple[Ints, Lists]:
        indices = self._indices.reshape(-1)
        of_node: dict[int, tuple[int, ...]] = {}
        for calls in self.alike:
            if flops(self.operators[calls.operator]):
                groups = chain.from_iterable(self._sharded[calls.operator])
                places = _there(calls.values, list(groups))
                own = indices[_places(calls.values, places, self.dims)].tolist()
                own = [tuple(sorted(set(each))) for each in own]
                of_node |= dict(zip(calls.nodes.tolist(), own, strict=True))
        families: dict[tuple[int, ...], int] = {}
        family = np.full(self.nodes, -1, np.int64)
        for node in sorted(of_node):
            family[node] = families.setdefault(of_node[node], len(families))
        counts = np.array(list(map(len, families)) or [0], np.int64)
        return family, Lists.of(counts, list(chain.from_iterable(families)))


def _there(values: Ints, group: list[_Place]) -> list[_Place]:
    """Returns those that are of values. `values`: by call and slot, -1 where all calls lack one."""
    return [place for place in group if len(values) and values[0, place[0]] >= 0]


def _places(values: Ints, places: Sequence[_Place], dims: int) -> Ints:
    """Returns by call the numbers of these dimensions of slots, where all values have so many."""
    slots, own = np.array(places, np.int64).reshape(-1, 2).T
    return values[:, slots] * dims + own


def _sharded(operator: Operator) -> list[list[_Place]]:
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


@njit(cache=True)
def _pass_back(
    reads_begin: Ints,
    reads: Ints,
    results_begin: Ints,
    results: Ints,
    passing: NDArray[np.bool_],
    late: Ints,
) -> None:
    """late(v) = p if v is the gradient of p, or all that reads v passes on sums and gives what
    is late; and nothing else ends in v. `late`: of what ends, before; `_OPEN` of all others.
    """
    for node in range(len(passing) - 1, -1, -1):
        own = _OPEN
        for k in range(results_begin[node], results_begin[node + 1]):
            if results[k] >= 0:
                own = min(own, late[results[k]])
        if own == _OPEN or not passing[node]:
            own = -1
        for k in range(reads_begin[node], reads_begin[node + 1]):
            late[reads[k]] = min(own, late[reads[k]])


@njit(cache=True)
def _flood(begin: Ints, near: Ints, first: Ints, in_time: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Returns what is reached from the first nodes, all of which flood at once, and by which of
    them. Of others than those `in_time` only others are reached, or first ones.
    """
    nearest, reached, count = np.full(len(begin) - 1, -1), np.empty(len(begin) - 1, np.int64), 0
    for rank in range(len(first)):
        nearest[first[rank]], reached[rank] = rank, first[rank]
    count, k = len(first), 0
    while k < count:
        node = reached[k]
        for other in near[begin[node] : begin[node + 1]]:
            if nearest[other] < 0 and (in_time[other] or not in_time[node]):
                nearest[other], reached[count] = nearest[node], other
                count += 1
        k += 1
    return reached[:count], nearest[reached[:count]]

"""From a graph alone to a division of all its operators, in time linear in their number.

As MindSpore's symbolic planner (SAPP, "recursive programming"): the machine is halved again and
again, and each halving divides every operator once more or leaves it. Operators are decided in
order of weight, heaviest first, on relative costs alone: those of sums within an operator, and of
redistributions to and from the neighbours that are decided. Then those next to which
something is sent are looked at again, a few times at most, so that all of it takes time in
proportion to operators x halvings.

What MindSpore knows of a layer, that the sum over its batch is one of gradients, is found here in
the graph of both passes: products over the same indices are one family (`graph.py`).

An axis of 2^k devices is k halvings that are the same, so it is decided at once: on a mesh
(2, 2, ..., 2) all halvings are free. One that finds all as the last one did, on the same links,
decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType

import numpy as np

from pipedream.graph.cluster import Link
from pipedream.graph.errors import UserError
from pipedream.graph.placements.operators import OperatorCall, OperatorGraph
from pipedream.graph.placements.placement import Mesh, Placement, Placements, Shard, show_placements
from pipedream.graph.placements.requests import Requests, requested_values
from pipedream.optimizer.recursive.graph import HalvingGraph
from pipedream.optimizer.recursive.kernel import Moves, decide
from pipedream.optimizer.recursive.options import Floats, Ints, OptionTable, given_state
from pipedream.sharding.assignment import Assignment, LinkedMesh
from pipedream.sharding.axis import chunk_numbers

_SWEEPS = 8
_LONG = 2**40
_NOT_OF_CALLS = "this search takes placements of parameters, buffers and inputs alone: leave it out"
_NOTHING: Mapping[str, float] = MappingProxyType({})


def recursive(
    graph: OperatorGraph,
    mesh: LinkedMesh,
    requests: Requests | None = None,
    seconds: Mapping[str, float] = _NOTHING,
    minibatches: float = 1.0,
) -> Assignment:
    """Divides all operators of the graph on the mesh.

    `requests`: of parameters, buffers and inputs; what else is an input comes whole. `seconds`:
    what the calls with these names take on one device. Without any, each product is divided as long
    as it can be, and latencies do not count. `minibatches`: of an update, for which gradients of
    parameters are summed once. The same arguments give the same assignment in every process. Raises
    UserError for a request that cannot be met.
    """
    return RecursiveSearch(graph).run(mesh, requests, seconds, minibatches)


@dataclass(frozen=True)
class RecursiveSearch:
    """Searches one graph for several meshes: what is known of its operators is kept."""

    graph: OperatorGraph
    _tables: dict[frozenset[Placement], tuple[OptionTable, Ints]] = field(
        default_factory=dict, init=False
    )
    """By the placements of requests, with the states of the whole operators by node."""

    def run(
        self,
        mesh: LinkedMesh,
        requests: Requests | None = None,
        seconds: Mapping[str, float] = _NOTHING,
        minibatches: float = 1.0,
    ) -> Assignment:
        """As `recursive`."""
        placements = self._requested(mesh.sizes, requests or Requests())
        table, states = self._table(frozenset(each for its in placements.values() for each in its))
        products = np.zeros(len(states), np.int64)
        products[self._halving.heavy] = 1
        must = np.zeros_like(products) if seconds else products
        timed = [seconds.get(name, 0.0) for name in self._names] if seconds else []
        work = np.zeros(len(products))
        work[len(work) - len(timed) :] = timed
        chosen = np.zeros((len(states), len(mesh.sizes)), np.int64)
        before: tuple[Ints, Floats, int, Link] | None = None
        for axis, (devices, link) in enumerate(zip(mesh.sizes, mesh.links, strict=True)):
            rows = _each(states, partial(table.row, devices=devices))
            for node, its in placements.items():
                rows[node] = table.row(int(states[node]), devices, its[axis])
            if before is not None and _alike(before, (rows, work, devices, link)):
                chosen[:, axis] = chosen[:, axis - 1]
                continue
            before = rows, work, devices, link
            arrays = table.arrays()
            parts, rounds = table.moves(devices)
            latency = float(link.seconds(1)) if seconds else 0.0
            per_byte = np.float64(_seconds_per_byte(link))
            fixed = rounds * np.float64(latency)
            moves = Moves(parts * per_byte, fixed, devices, float(minibatches))  # else two kernels
            nodes, order = self._halving.arrays, self._halving.order
            chosen[:, axis] = decide(nodes, arrays, order, rows, moves, work, must, _SWEEPS)
            work = np.where(arrays.divides[chosen[:, axis]], work / devices, work)
            states = _each(chosen[:, axis], table.after)
        return self._assignment(mesh, table, chosen)

    @cached_property
    def _halving(self) -> HalvingGraph:
        return HalvingGraph(self.graph)

    def _requested(self, mesh: Mesh, requests: Requests) -> dict[int, Placements]:
        """Returns the placements of what the graph is given, by node. Raises UserError."""
        if requests.operators:
            name = next(iter(requests.operators))
            raise UserError(f"operators.{name}: {_NOT_OF_CALLS}")
        if not requests.parameters and not requests.values:
            return {}
        nodes = {each.value: number for number, each in enumerate(self.graph.inputs)}
        values = requested_values(self.graph, mesh, requests)
        if other := next((value for value in values if value not in nodes), None):
            raise UserError(f"values.{other}: {_NOT_OF_CALLS}")
        return {nodes[value]: placements for value, placements in values.items()}

    def _table(self, requested: frozenset[Placement]) -> tuple[OptionTable, Ints]:
        if requested not in self._tables:
            operators, of_call = self._halving.operators, self._halving.of_call
            counts = np.bincount(of_call, minlength=len(operators)).tolist()
            calls = dict(zip(operators, counts, strict=True))
            table = OptionTable(chunk_numbers(calls, 2, requested))
            numbers = np.array([table.number((each,)) for each in operators], np.int64)
            given = [table.number(given_state(each)) for each in self.graph.inputs]
            states = np.append(np.array(given, np.int64), numbers[of_call])
            self._tables[requested] = table, states
        return self._tables[requested]

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(call.name for call in self.graph.calls)

    @cached_property
    def _writing(self) -> tuple[OperatorCall, ...]:
        return tuple(call for call in self.graph.calls if call.operator.stays)

    def _assignment(self, mesh: LinkedMesh, table: OptionTable, chosen: Ints) -> Assignment:
        """`chosen`: the options by node and axis."""
        numbers, examples = _numbered(chosen)
        distinct = [
            tuple(table.strategies[option] for option in row) for row in chosen[examples].tolist()
        ]
        ends = [
            tuple(zip(*((*each.inputs, *each.outputs) for each in strategies), strict=True))
            for strategies in distinct
        ]
        nodes = self._halving.arrays
        made = numbers[nodes.producers].tolist(), nodes.slots.tolist()
        values = zip(self._halving.values, *made, strict=True)
        placed = {value: ends[number][slot] for value, number, slot in values}
        own = map(distinct.__getitem__, numbers[len(self.graph.inputs) :].tolist())
        strategies = dict(zip(self._names, own, strict=True))
        assignment = Assignment(self.graph, mesh, strategies, placed)
        _check_written(assignment, self._writing)
        return assignment


def parts(call: OperatorCall, assignment: Assignment) -> tuple[tuple[int, ...], ...]:
    """Returns for each tensor that the call reads, and then gives, into how many parts each of its
    dimensions is divided: 2^n where n halvings divide it.
    """
    types = (*call.operator.inputs, *call.operator.outputs)
    counts = [[1] * len(type_.shape) if type_ is not None else [] for type_ in types]
    strategies = assignment.strategies[call.name]
    for strategy, devices in zip(strategies, assignment.mesh.sizes, strict=True):
        for count, its in zip(counts, (*strategy.inputs, *strategy.outputs), strict=True):
            if isinstance(its, Shard) and count:
                count[its.dim] *= devices
    return tuple(map(tuple, counts))


def _each(numbers: Ints, function: Callable[[int], int]) -> Ints:
    """Returns the function of all numbers, which is called once for each distinct one."""
    distinct = np.flatnonzero(np.bincount(numbers))
    table = np.zeros(len(numbers) and int(distinct[-1]) + 1, np.int64)
    table[distinct] = [function(number) for number in distinct.tolist()]
    return table[numbers]


def _numbered(rows: Ints) -> tuple[Ints, Ints]:
    """Returns a number of each row, the same for equal ones, and by number one that has it."""
    numbers = np.zeros(len(rows), np.int64)
    for k, column in enumerate(rows.T):
        if k == 0 or (column != rows[:, k - 1]).any():
            both = numbers * (column.max(initial=0) + 1) + column
            numbers = np.unique(both, return_inverse=True)[1].reshape(-1)
    examples = np.zeros(numbers.max(initial=-1) + 1, np.int64)
    examples[numbers] = np.arange(len(rows))
    return numbers, examples


def _alike(one: tuple[Ints, Floats, int, Link], other: tuple[Ints, Floats, int, Link]) -> bool:
    """Tells whether an axis has the rows, seconds of work, devices and link of another."""
    return (
        one[2:] == other[2:]
        and bool((one[0] == other[0]).all())
        and bool((one[1] == other[1]).all())
    )


def _seconds_per_byte(link: Link) -> float:
    """Returns what a further byte of a long message takes."""
    return float(link.seconds(2 * _LONG) - link.seconds(_LONG)) / _LONG


def _check_written(assignment: Assignment, writing: Iterable[OperatorCall]) -> None:
    """Raises UserError if what one of these operators changes in place is not where it wants it."""
    for call in writing:
        for number in call.operator.stays:
            value, wanted = call.reads[number], assignment.targets(call.name)[number]
            placed = assignment.placed[value]
            if placed != wanted:
                raise UserError(
                    f"{value}: it is changed in place, so it stays {show_placements(placed)}, but"
                    f" {call.name} ({call.operator.target}) needs {show_placements(wanted)}: choose"
                    " that placement for it"
                )

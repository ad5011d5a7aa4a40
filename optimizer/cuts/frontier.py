"""The lightest cuts of a graph by the compute before them, without listing all cuts.

A graph of parallel branches has as many downsets as the product of their lengths, but most differ
only in how far each branch has come. Here a topological order is swept, deciding node by node
whether it is before the cut. All that matters of past decisions is the *frontier* (which of the
nodes still to be read are before the cut, and which of these are known to cross it) and the compute
before the cut, in bins. For each such state the fewest bytes crossing, and the ranges of compute
and of parameter bytes, of all downsets that lead there are kept: a dynamic program over a path
decomposition, exponential only in the width of the frontier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pipedream.optimizer.cuts.antichains import bits, depth_first, fewest_bytes
from pipedream.optimizer.cuts.downsets import States
from pipedream.optimizer.cuts.planning_graph import Floats, PlanningGraph

_SLOTS = 31  # places of the frontier: two bits each of a state's code
_MOST_STATES = 4_096
_WORK = 6e7  # cells that take about two seconds to fill
_FEWEST, _ENOUGH, _MOST = 100, 1_000, 5_000  # bins by compute time
_BY_PARAMETERS = 64

# The figures of a bin, all minimised: bytes across, and bounds on parameter bytes and on seconds.
_FIGURES = 5

Codes = NDArray[np.uint64]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Bins:
    """All downsets, in bins by what lies before the cut; arrays have one entry per bin.

    Each downset is in one bin. `column` grows with its compute time and `row` with its parameter
    bytes; neither is less for a downset than for one inside it. Bins are ordered by column, then by
    row, and the first and the last hold only the empty downset and the whole graph. `bytes_across`
    is a lower bound on the bytes across cuts of the bin, and `lightest` a downset that attains it,
    as bits (node 0 lowest). If too wide a frontier was truncated, the bound may not be attained,
    and `lightest` may have more bytes or be None.
    """

    column: Numbers
    row: Numbers
    least_seconds: Floats
    most_seconds: Floats
    least_parameters: Floats
    most_parameters: Floats
    bytes_across: Floats
    lightest: tuple[int | None, ...]

    def __len__(self) -> int:
        return len(self.column)

    @cached_property
    def working(self) -> Floats:
        """As states of a search, each bin has more work before it than the last."""
        return np.arange(len(self), dtype=np.float64)

    def after(self, start: int, end: int) -> States:
        """The bins up to `end` that may have a downset around one of `start`."""
        return np.flatnonzero(self.row[start + 1 : end + 1] >= self.row[start]) + start + 1

    def merged(self, most: int) -> Bins:
        """Merges these into at most `most` bins (at least three), over a coarser grid."""
        count, most = max(most, 3), max(most, 3)
        while len(cells := np.unique(self._cells(count))) > most:
            count = min(count * most // len(cells) + 1, count - 1)
        _, group = np.unique(self._cells(count), return_inverse=True)
        by_bytes = np.lexsort((self.bytes_across, group))
        lightest = by_bytes[np.flatnonzero(np.diff(group[by_bytes], prepend=-1))]
        first = np.unique(group, return_index=True)[1]
        return Bins(
            column=self.column[first],
            row=self.row[first] * _rows(count) // (self.row[-1] + 1),
            least_seconds=_grouped(np.minimum, self.least_seconds, group),
            most_seconds=_grouped(np.maximum, self.most_seconds, group),
            least_parameters=_grouped(np.minimum, self.least_parameters, group),
            most_parameters=_grouped(np.maximum, self.most_parameters, group),
            bytes_across=self.bytes_across[lightest],
            lightest=tuple(self.lightest[index] for index in lightest),
        )

    def _cells(self, count: int) -> Numbers:
        """For each bin the number of its cell in a grid of `count` columns and fewer rows."""
        rows = _rows(count)
        column = self.column * count // (self.column[-1] + 1)
        row = self.row * rows // (self.row[-1] + 1)
        cells: Numbers = column * rows + row + 1
        cells[0], cells[-1] = 0, (count + 1) * rows
        return cells


def _rows(columns: int) -> int:
    return max(1, min(_BY_PARAMETERS, columns // 8))


def _grouped(join: np.ufunc, values: Floats, group: Numbers) -> Floats:
    """`join` over the values of each group."""
    first = np.unique(group, return_index=True)[1]
    joined: Floats = values[first].copy()
    join.at(joined, group, values)
    return joined


def bins_of(graph: PlanningGraph, work: float = _WORK, most_states: int = _MOST_STATES) -> Bins:
    """All downsets, in as many bins as take about `work` elementary steps to fill.

    Bins are of equal compute time or, if there can be enough, of equal compute time and equal
    parameter bytes. If the frontier has more than `most_states` states, nodes of few bytes are
    forgotten: whether they are before the cut is no longer checked for their readers, and their
    bytes never count as crossing. Bounds stay valid.
    """
    cells = None
    while cells is None:
        cells = _survey(graph, most_states, budget=work / 4)
        most_states = most_states if cells else max(1, most_states // 8)
    count = int(_FEWEST * work / cells)
    by_both = _Grid(min(count // (_BY_PARAMETERS + 1), _MOST), _BY_PARAMETERS)
    grid = by_both if by_both.columns >= _ENOUGH else _Grid(max(_FEWEST, min(count, _MOST)))
    sweep = _FrontierSweep(graph, grid, most_states)
    for step in range(len(graph)):
        sweep.advance(step)
    return sweep.bins()


def _survey(graph: PlanningGraph, most_states: int, budget: float) -> int | None:
    """The number of cells with the fewest bins; None if above `budget` and reducible."""
    sweep, cells = _FrontierSweep(graph, _Grid(_FEWEST), most_states), 1
    for step in range(len(graph)):
        sweep.advance(step)
        cells += len(sweep.back_pointers[-1].came)
        if cells > budget and most_states > 1:
            return None
    return cells


class _Grid(NamedTuple):
    """Equal shares of compute time and of parameter bytes; bin = column * (rows + 1) + row."""

    columns: int
    rows: int = 0

    @property
    def bins(self) -> int:
        return (self.columns + 1) * (self.rows + 1)


class _FrontierStates(NamedTuple):
    """The states after a step. The figures of state s are in columns `start[s]` to `start[s + 1]`,
    the first of them for bin `base[s]`.
    """

    codes: Codes
    base: Numbers
    start: Numbers
    figures: Floats


class _BackPointers(NamedTuple):
    """Back pointers of one step.

    `origins[first_origin[s] + came[column]]` is 2 * (the state before) + (the node was taken).
    """

    base: Numbers
    start: Numbers
    first_origin: Numbers
    origins: Numbers
    came: NDArray[np.uint16]


@dataclass
class _FrontierSweep:
    graph: PlanningGraph
    grid: _Grid
    most_states: int
    slots: dict[int, int] = field(default_factory=dict)
    forgotten: set[int] = field(default_factory=set)
    back_pointers: list[_BackPointers] = field(default_factory=list)

    def __post_init__(self) -> None:
        graph, total = self.graph, len(self.graph)
        self.order = fewest_bytes(graph)
        step_of = {node: step for step, node in enumerate(self.order)}
        self.last_read = [
            max((step_of[reader] for reader in graph.consumers[node]), default=-1)
            for node in range(total)
        ]
        self.last_source = max(step_of[node] for node in range(total) if not graph.producers[node])
        order = list(depth_first(graph))
        self.shift = _shares(order, graph.compute_seconds, self.grid.columns) * (self.grid.rows + 1)
        self.shift += _shares(order, graph.parameter_bytes, self.grid.rows)
        width = self.grid.bins
        self.final = np.full((_FIGURES, width), np.inf)
        self.final_from = np.zeros((2, width), dtype=np.int64)  # step, and origin as in _Trail
        self.states = _FrontierStates(
            codes=np.zeros(1, dtype=np.uint64),
            base=np.zeros(1, dtype=np.int64),
            start=np.array([0, 1], dtype=np.int64),
            figures=np.zeros((_FIGURES, 1)),
        )
        self.truncated = False

    def advance(self, step: int) -> None:
        """Decides about one node in every state."""
        graph, node = self.graph, self.order[step]
        known = [producer for producer in graph.producers[node] if producer in self.slots]
        slots = np.array([self.slots[producer] for producer in known], dtype=np.int64)
        cleared = self._leave(step)
        slot = self._enter(node)
        codes, base, start, figures, *back = _advance(
            self.states,
            (slots, graph.output_bytes[known]),
            (slot, np.uint64(cleared), self.shift[node]),
            (graph.parameter_bytes[node], graph.compute_seconds[node]),
            step >= self.last_source and not self.forgotten,
            step == len(graph) - 1,
            self.final,
            self.final_from,
            step,
        )
        self.states = _FrontierStates(codes, base, start, figures)
        self.back_pointers.append(_BackPointers(base, start, *back))

    def _leave(self, step: int) -> int:
        """Removes nodes read for the last time from the frontier, and a light one to forget if the
        states are too many or the slots full. Returns the bits of the codes to clear.
        """
        leaving = [node for node in self.slots if self.last_read[node] == step]
        staying = sorted(
            (node for node in self.slots if self.last_read[node] > step),
            key=lambda node: self.graph.output_bytes[node],
        )
        crowded = len(self.states.codes) > self.most_states or len(staying) == _SLOTS
        if crowded and staying:
            leaving.append(staying[0])
            self.forgotten.add(staying[0])
            self.truncated = True
        self.forgotten = {node for node in self.forgotten if self.last_read[node] > step}
        return sum(3 << 2 * self.slots.pop(node) for node in leaving)

    def _enter(self, node: int) -> int:
        """The slot of the node in the frontier; -1 if nothing reads it."""
        if not self.graph.consumers[node]:
            return -1
        taken = set(self.slots.values())
        self.slots[node] = next(slot for slot in range(_SLOTS) if slot not in taken)
        return self.slots[node]

    def bins(self) -> Bins:
        graph, stride = self.graph, self.grid.rows + 1
        filled = np.flatnonzero(np.isfinite(self.final[0]))
        figures = self.final[:, filled]
        figures[[2, 4]] *= -1
        seconds, parameters = graph.compute_seconds.sum(), graph.parameter_bytes.sum()
        whole = [0.0, parameters, parameters, seconds, seconds]
        figures = np.column_stack([np.zeros(_FIGURES), figures, whole])
        return Bins(
            column=np.concatenate([[0], filled // stride, [self.grid.columns]]),
            row=np.concatenate([[0], filled % stride, [self.grid.rows]]),
            bytes_across=figures[0],
            least_parameters=figures[1],
            most_parameters=figures[2],
            least_seconds=figures[3],
            most_seconds=figures[4],
            lightest=(0, *self._lightest(filled), (1 << len(graph)) - 1),
        )

    def _lightest(self, bins: Numbers) -> tuple[int | None, ...]:
        steps = self.back_pointers
        back = _BackPointers(*map(np.concatenate, zip(*steps, strict=True)))
        sizes = [[len(step.base), len(step.origins), len(step.came)] for step in steps]
        offsets = np.cumsum([[0] * 3, *sizes], axis=0)
        order = np.array(self.order)
        taken = np.zeros((len(bins), len(order)), dtype=np.bool_)
        _trace(bins, self.final_from, self.shift[order], offsets, back, taken)
        inside = np.zeros_like(taken)
        inside[:, order] = taken
        packed = np.packbits(inside, axis=1, bitorder="little")
        downsets = (int.from_bytes(row.tobytes(), "little") for row in packed)
        if not self.truncated:
            return tuple(downsets)
        masks = self.graph.producer_masks
        return tuple(
            downset if all(not masks[node] & ~downset for node in bits(downset)) else None
            for downset in downsets
        )


def _shares(order: Sequence[int], amounts: Floats, count: int) -> Numbers:
    """How many of `count` equal shares of the total each node has, rounded so that the cumulative
    sums in this order are right.
    """
    if not amounts.any():
        return np.zeros(len(order), dtype=np.int64)
    ends = np.rint(np.cumsum(amounts[order]) / amounts.sum() * count).astype(np.int64)
    shares = np.empty(len(order), dtype=np.int64)
    shares[order] = np.diff(ends, prepend=0)
    return shares


@njit(cache=True)
def _advance(states, read, node, amounts, closed, last, final, final_from, step):  # type: ignore[no-untyped-def]
    """Every state with the node after the cut and, if its producers are before it, before the cut.

    `read`: slots and bytes of the producers; `node`: its slot, the bits to clear, its shift in
    bins; `amounts`: its parameter bytes and seconds. Finished states (all in the last step, and
    those with an empty frontier if it is `closed`) are merged into `final`.
    """
    # bytes[state', bin'] = min over (state, bin) and choices that lead there of
    #     bytes[state, bin] + bytes now known to cross;  bin' = bin + shift if the node is taken
    shift = node[2]
    targets, charges, live = _decided(states.codes, read, node[0], node[1])
    over = live & (last | (closed & (targets == 0)))
    for origin in np.flatnonzero(over):
        to = states.base[origin // 2] + shift * (origin % 2)
        first, end = states.start[origin // 2], states.start[origin // 2 + 1]
        for column in range(first, end):
            at = to + column - first
            if _lower(final, at, states.figures, column, charges[origin], origin % 2, amounts):
                final_from[0, at] = step
                final_from[1, at] = origin
    origins = np.flatnonzero(live & ~over)
    origins = origins[np.argsort(targets[origins], kind="mergesort")]
    codes, base, start, first_origin = _spread(states, origins, targets[origins], shift)
    figures = np.full((_FIGURES, start[-1]), np.inf)
    came = np.zeros(start[-1], dtype=np.uint16)
    for state in range(len(codes)):
        for k in range(first_origin[state], first_origin[state + 1]):
            origin = origins[k]
            first, end = states.start[origin // 2], states.start[origin // 2 + 1]
            to = start[state] + states.base[origin // 2] + shift * (origin % 2) - base[state]
            for column in range(first, end):
                at = to + column - first
                if _lower(
                    figures, at, states.figures, column, charges[origin], origin % 2, amounts
                ):
                    came[at] = k - first_origin[state]
    return codes, base, start, figures, first_origin, origins, came


@njit(cache=True)
def _decided(codes, read, slot, cleared):  # type: ignore[no-untyped-def]
    """For each state s its successor without the node, at 2 s, and with it, at 2 s + 1: the code,
    the bytes now known to cross, and whether it is possible.
    """
    slots, slot_bytes = read
    one, two, three = np.uint64(1), np.uint64(2), np.uint64(3)
    targets = np.empty(2 * len(codes), dtype=np.uint64)
    charges = np.zeros(2 * len(codes))
    live = np.ones(2 * len(codes), dtype=np.bool_)
    for state, code in enumerate(codes):
        without = code
        for k in range(len(slots)):
            place = np.uint64(2 * slots[k])
            status = (code >> place) & three
            if status == 0:
                live[2 * state + 1] = False
            elif status == one:
                without = (without & ~(three << place)) | (two << place)
                charges[2 * state] += slot_bytes[k]
        within = code & ~cleared
        if slot >= 0:
            within |= one << np.uint64(2 * slot)
        targets[2 * state] = without & ~cleared
        targets[2 * state + 1] = within
    return targets, charges, live


@njit(cache=True)
def _spread(states, origins, targets, shift):  # type: ignore[no-untyped-def]
    """The distinct states among sorted `targets`, and the bins that their origins reach."""
    first = np.ones(len(targets) + 1, dtype=np.bool_)
    first[1:-1] = targets[1:] != targets[:-1]
    first_origin = np.flatnonzero(first)
    size = len(first_origin) - 1
    base = np.empty(size, dtype=np.int64)
    start = np.zeros(size + 1, dtype=np.int64)
    for state in range(size):
        low, high = np.int64(1 << 62), np.int64(0)
        for origin in origins[first_origin[state] : first_origin[state + 1]]:
            at = states.base[origin // 2] + shift * (origin % 2)
            low = min(low, at)
            high = max(high, at + states.start[origin // 2 + 1] - states.start[origin // 2])
        base[state] = low
        start[state + 1] = start[state] + high - low
    return targets[first_origin[:-1]], base, start, first_origin


@njit(cache=True)
def _lower(figures, to, source, column, charge, taken, amounts):  # type: ignore[no-untyped-def]
    """Lowers the figures of a bin by those of another; True if the bytes became fewer."""
    if source[0, column] == np.inf:
        return False
    more_parameters, more_seconds = amounts[0] * taken, amounts[1] * taken
    figures[1, to] = min(figures[1, to], source[1, column] + more_parameters)
    figures[2, to] = min(figures[2, to], source[2, column] - more_parameters)
    figures[3, to] = min(figures[3, to], source[3, column] + more_seconds)
    figures[4, to] = min(figures[4, to], source[4, column] - more_seconds)
    fewer = source[0, column] + charge < figures[0, to]
    if fewer:
        figures[0, to] = source[0, column] + charge
    return fewer


@njit(cache=True)
def _trace(bins, final_from, shifts, offsets, back, taken):  # type: ignore[no-untyped-def]
    """Follows back pointers from each bin, marking its lightest downset in taken[bin, step]."""
    for row in range(len(bins)):
        at = bins[row]
        step = final_from[0, at]
        origin = final_from[1, at]
        while True:
            if origin % 2:
                taken[row, step] = True
                at -= shifts[step]
            step -= 1
            if step < 0:
                break
            state = origin // 2
            states, origins, columns = offsets[step]
            base = back.base[states + state]
            column = back.start[states + step + state] + at - base
            first = back.first_origin[states + step + state]
            origin = back.origins[origins + first + back.came[columns + column]]

"""The lightest cuts of a graph by how much compute lies before them, without listing all cuts.

A graph of parallel branches has as many downsets as the product of their lengths, but most differ
only in which branch has come how far. Here a topological order is walked, deciding of one node
after another whether it is before the cut. All that matters of the decisions made is the
*frontier*, which of the nodes that are yet to be read are before the cut and which of these are
known to cross it, and how much compute is before the cut, in bins. For each such state the fewest
bytes, and the ranges of compute and of parameter bytes, of all downsets that lead there are kept: a
dynamic program over a path decomposition, exponential only in the width of the frontier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pipedream.optimizer.cuts.antichains import bits
from pipedream.optimizer.cuts.planning_graph import Floats, PlanningGraph
from pipedream.optimizer.cuts.topological_orders import depth_first, fewest_bytes

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
    """All downsets by what lies before the cut; arrays of one entry for each bin.

    Each downset is in one bin. `column` grows with its compute time and `row` with its parameter
    bytes, and neither is less for a downset than for one inside it; bins come by column, then by
    row; one more at each end has the empty downset and the whole graph alone. `bytes_across` is
    what no downset of the bin has less of, and `lightest` one that has so little, as bits (node 0
    lowest). Where too wide a frontier was cut short the bound may be below any downset's, and
    `lightest` one that has more, or None.
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

    def merged(self, most: int) -> Bins:
        """At most `most` bins (or three) made of these, over a coarser grid."""
        count, most = max(most, 3), max(most, 3)
        while len(cells := np.unique(self._cells(count))) > most:
            count = min(count * most // len(cells) + 1, count - 1)
        _, group = np.unique(self._cells(count), return_inverse=True)
        by_bytes = np.lexsort((self.bytes_across, group))
        lightest = by_bytes[np.flatnonzero(np.diff(group[by_bytes], prepend=-1))]
        first = np.unique(group, return_index=True)[1]
        return Bins(
            column=self.column[first],
            row=self.row[first],
            least_seconds=_grouped(np.minimum, self.least_seconds, group),
            most_seconds=_grouped(np.maximum, self.most_seconds, group),
            least_parameters=_grouped(np.minimum, self.least_parameters, group),
            most_parameters=_grouped(np.maximum, self.most_parameters, group),
            bytes_across=self.bytes_across[lightest],
            lightest=tuple(self.lightest[index] for index in lightest),
        )

    def _cells(self, count: int) -> Numbers:
        """For each bin the number of its cell in a grid of `count` columns and fewer rows."""
        rows = max(1, min(_BY_PARAMETERS, count // 8))
        column = self.column * count // (self.column[-1] + 1)
        row = self.row * rows // (self.row[-1] + 1)
        cells: Numbers = column * rows + row + 1
        cells[0], cells[-1] = 0, (count + 1) * rows
        return cells


def _grouped(join: np.ufunc, values: Floats, group: Numbers) -> Floats:
    """What `join` makes of the values of each group."""
    first = np.unique(group, return_index=True)[1]
    joined: Floats = values[first].copy()
    join.at(joined, group, values)
    return joined


def bins_of(graph: PlanningGraph, work: float = _WORK, most_states: int = _MOST_STATES) -> Bins:
    """All downsets, in as many bins as take about `work` elementary steps to fill.

    Bins of equal compute time; or, where there can be enough of them, of equal compute time and
    equal parameter bytes. Where the frontier has more than `most_states` states, nodes of few bytes
    are forgotten: their readers are taken to come before the cut whether they did or not, and their
    bytes never to cross. Bounds stay valid.
    """
    cells = None
    while cells is None:
        cells = _survey(graph, most_states, budget=work / 4)
        most_states = most_states if cells else max(1, most_states // 8)
    count = int(_FEWEST * work / cells)
    by_both = _Grid(min(count // (_BY_PARAMETERS + 1), _MOST), _BY_PARAMETERS)
    grid = by_both if by_both.columns >= _ENOUGH else _Grid(max(_FEWEST, min(count, _MOST)))
    walk = _FrontierSweep(graph, grid, most_states)
    for step in range(len(graph)):
        walk.advance(step)
    return walk.bins()


def _survey(graph: PlanningGraph, most_states: int, budget: float) -> int | None:
    """How many cells the fewest bins take; None if more than `budget`, where it could be fewer."""
    walk, cells = _FrontierSweep(graph, _Grid(_FEWEST), most_states), 1
    for step in range(len(graph)):
        walk.advance(step)
        cells += len(walk.trails[-1].came)
        if cells > budget and most_states > 1:
            return None
    return cells


class _Grid(NamedTuple):
    """Equal shares of the compute time and of the parameter bytes; a bin's number is
    column * (rows + 1) + row.
    """

    columns: int
    rows: int = 0

    @property
    def bins(self) -> int:
        return (self.columns + 1) * (self.rows + 1)


class _FrontierStates(NamedTuple):
    """The states after a step, and where their figures lie: those of state s in the columns from
    `start[s]` to `start[s + 1]`, the first of them for bin `base[s]`.
    """

    codes: Codes
    base: Numbers
    start: Numbers
    figures: Floats


class _BackPointers(NamedTuple):
    """How the states of a step came about, to find the way back.

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
    trails: list[_BackPointers] = field(default_factory=list)

    def __post_init__(self) -> None:
        graph, total = self.graph, len(self.graph)
        self.order = fewest_bytes(graph)
        step_of = {node: step for step, node in enumerate(self.order)}
        self.last_read = [
            max((step_of[reader] for reader in graph.consumers[node]), default=-1)
            for node in range(total)
        ]
        self.last_source = max(step_of[node] for node in range(total) if not graph.producers[node])
        order = depth_first(graph)
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
        self.cut_short = False

    def advance(self, step: int) -> None:
        """Decides about one node, in every state."""
        graph, node = self.graph, self.order[step]
        known = [producer for producer in graph.producers[node] if producer in self.slots]
        slots = np.array([self.slots[producer] for producer in known], dtype=np.int64)
        cleared = self._leave(step)
        slot = self._enter(node)
        codes, base, start, figures, *trail = _advance(
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
        self.trails.append(_BackPointers(base, start, *trail))

    def _leave(self, step: int) -> int:
        """Takes out of the frontier who was read for the last time, and whom to forget, so that
        there are fewer states, and a place for one more. Returns the bits of the codes to clear.
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
            self.cut_short = True
        self.forgotten = {node for node in self.forgotten if self.last_read[node] > step}
        return sum(3 << 2 * self.slots.pop(node) for node in leaving)

    def _enter(self, node: int) -> int:
        """Gives the node a place in the frontier; -1 if nothing reads it."""
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
        trail = _BackPointers(*(np.concatenate(parts) for parts in zip(*self.trails, strict=True)))
        offsets = np.cumsum(
            [[0] * 3]
            + [[len(part.base), len(part.origins), len(part.came)] for part in self.trails],
            axis=0,
        )
        order = np.array(self.order)
        taken = np.zeros((len(bins), len(order)), dtype=np.bool_)
        _trace(bins, self.final_from, self.shift[order], offsets, trail, taken)
        inside = np.zeros_like(taken)
        inside[:, order] = taken
        packed = np.packbits(inside, axis=1, bitorder="little")
        downsets = (int.from_bytes(row.tobytes(), "little") for row in packed)
        if not self.cut_short:
            return tuple(downsets)
        masks = self.graph.producer_masks
        return tuple(
            downset if all(not masks[node] & ~downset for node in bits(downset)) else None
            for downset in downsets
        )


def _shares(order: Sequence[int], amounts: Floats, count: int) -> Numbers:
    """How many of `count` equal shares of the whole each node makes up.

    Rounded so that whatever follows in this order adds up.
    """
    if not amounts.any():
        return np.zeros(len(order), dtype=np.int64)
    ends = np.rint(np.cumsum(amounts[order]) / amounts.sum() * count).astype(np.int64)
    shares = np.empty(len(order), dtype=np.int64)
    shares[order] = np.diff(ends, prepend=0)
    return shares


@njit(cache=True)
def _advance(states, read, node, amounts, closed, last, final, final_from, step):  # type: ignore[no-untyped-def]
    """Every state with the node after the cut and, where its producers are before it, before it.

    `read`: slots and bytes of the producers; `node`: its slot, the bits to clear, its shift;
    `amounts`: its parameter bytes and seconds. States of which nothing can come any more (an empty
    frontier where it is `closed`, all in the last step) go to `final`.
    """
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
    """For each state s what comes of it, in 2 s without the node and in 2 s + 1 with it: the code,
    the bytes that are now known to cross, and whether it can be.
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
            found = (code >> place) & three
            if found == 0:
                live[2 * state + 1] = False
            elif found == one:
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
    """The states that sorted `targets` make, and the bins that their origins reach."""
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
    """Lowers the figures of a bin by those of another; whether the bytes became fewer."""
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
def _trace(bins, final_from, shifts, offsets, trail, taken):  # type: ignore[no-untyped-def]
    """Follows each bin's lightest downset back, marking in `taken[bin, step]` what is in it."""
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
            base = trail.base[states + state]
            column = trail.start[states + step + state] + at - base
            first = trail.first_origin[states + step + state]
            origin = trail.origins[origins + first + trail.came[columns + column]]

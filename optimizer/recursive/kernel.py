"""Each node in turn takes the option that costs least next to what is decided around it.

Costs are relative: seconds of what a device sends (of its part of a tensor before this axis, by
`Moves`) and of its work, as if the axes after this one did not exist. Of an option p of node v

    cost(v, p) =   redistributions of what v reads, unless another reader has it so already,
                 + redistributions of what v gives to the decided readers, once for each placement
                 + sums of what v gives that nobody has asked for yet
                 + sums within v, and its share, by seconds, of those of the family of v (its
                   gradients) if they are divided along the same index
                 + seconds(v) / devices if p divides v, else seconds(v)

Sums of gradients of parameters are made once per update. Where costs are equal, those in each
minibatch count, then divided work, then fewer bytes held.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pipedream.optimizer.recursive.graph import (
    INPUT_GRADIENT,
    OUTPUT,
    PARAMETER_GRADIENT,
    GraphArrays,
)
from pipedream.optimizer.recursive.options import SUM, WHOLE, Floats, Ints, OptionArrays

Counts: TypeAlias = NDArray[np.int32]
_KEYS = 6
_CLOSE, _FAR = 1e-9, 1 + 1e-6
assert (OUTPUT, INPUT_GRADIENT, PARAMETER_GRADIENT, WHOLE, SUM) == (0, 1, 2, 0, 1)


class Moves(NamedTuple):
    """What brings a tensor from one code to another, on this axis of so many devices."""

    per_byte: Floats
    """[source, target]: seconds for each byte that a device has before this axis."""
    fixed: Floats
    """[source, target]: seconds, however many bytes."""
    devices: int
    minibatches: float
    """Of an update."""


@njit(cache=True)
def decide(  # noqa: C901 a kernel, in one piece to be fast
    graph: GraphArrays,
    options: OptionArrays,
    order: Ints,
    rows: Ints,
    moves: Moves,
    seconds: Floats,
    must: Ints,
    sweeps: int,
) -> Ints:
    """Returns the option of each node. `rows`: by node; `seconds`: of the work of each node before
    this axis; `must`: whether it is to be divided if it can be, whatever that costs. After the
    first decision a node is looked at again, at most `sweeps` times, if one next to it has changed,
    or sends something after its first decision. Where that gains nothing, none is divided.
    """
    chosen = np.full(len(rows), -1, np.int64)
    devices, codes_count = moves.devices, len(moves.fixed)
    wanted = np.zeros((len(graph.producers), codes_count + 1), np.int32)
    for node in range(len(rows)):
        if options.first[rows[node]] + 1 == options.first[rows[node] + 1]:
            chosen[node] = options.first[rows[node]]
            _count(graph, options, wanted, node, chosen[node], 1)
    slots = np.max(np.diff(graph.reads.begin)) + np.max(np.diff(graph.results.begin))
    minibatch = np.zeros((slots, codes_count))
    update = np.zeros((slots, codes_count))
    best, keys = np.zeros(_KEYS), np.zeros(_KEYS)
    places, own_sums, sums = _family_sums(graph, options, rows, moves, chosen)
    index_of = np.full(len(sums), -2, np.int64)
    family_seconds, share = np.zeros(len(sums)), 1.0
    for node in range(len(rows)):
        if graph.family[node] >= 0:
            family_seconds[graph.family[node]] += seconds[node]
    stale = np.zeros(len(rows), np.bool_)
    codes_at, codes, bytes_at = options.codes_at, options.codes, options.bytes_at
    bytes_, summed, divides = options.bytes, options.summed, options.divides
    for sweep in range(sweeps + 1):
        for node in order:
            row = rows[node]
            first, end = options.first[row], options.first[row + 1]
            if end - first == 1 or (sweep > 0 and not stale[node]):
                continue
            stale[node] = False
            if sweep > 0:
                _count(graph, options, wanted, node, chosen[node], -1)
            _read_costs(graph, options, rows, moves, chosen, wanted, node, minibatch)
            _result_costs(graph, options, rows, moves, chosen, wanted, node, minibatch, update)
            reads = graph.reads.begin[node + 1] - graph.reads.begin[node]
            results = graph.results.begin[node + 1] - graph.results.begin[node]
            before, chosen[node], best_work = chosen[node], -1, 0.0
            family = graph.family[node] if sweep == 0 else -1
            if family >= 0:
                sums[family] -= own_sums[graph.heavy[node]]
                share = seconds[node] / family_seconds[family] if seconds[node] > 0.0 else 1.0
            for option in range(first, end):
                often, once, held = _seconds(moves, SUM, WHOLE, summed[option]), 0.0, 0.0
                for slot in range(reads + results):
                    code = codes[codes_at[option] + slot]
                    often += minibatch[slot, code]
                    if slot >= reads:
                        once += update[slot, code]
                        own = bytes_[bytes_at[row] + slot]
                        held += own / devices if code > SUM else own
                sent = often + once / moves.minibatches
                other = 0.0
                if family >= 0:
                    place = places[graph.heavy[node], option - first]
                    if index_of[family] < -1:
                        sent += share * sums[family, place] if place >= 0 else 0.0
                    else:
                        other = 0.0 if place == index_of[family] else 1.0
                work = seconds[node] / devices if divides[option] else seconds[node]
                keys[0] = 1.0 if must[node] and not divides[option] else 0.0
                keys[1] = sent + work
                if chosen[node] >= 0 and keys[0] >= best[0] and keys[1] > best[1] * _FAR:
                    continue
                keys[2] = other
                keys[3] = often
                keys[4] = 0.0 if divides[option] else 1.0
                keys[5] = held
                better = chosen[node] < 0 or _less(keys, best)
                if better or (option == before and not _less(best, keys)):
                    chosen[node], best_work = option, work
                    best[:] = keys
            _count(graph, options, wanted, node, chosen[node], 1)
            if family >= 0 and index_of[family] < -1:
                index_of[family] = places[graph.heavy[node], chosen[node] - first]
            if chosen[node] != before and (sweep > 0 or best[1] > best_work):
                for k in range(graph.near.begin[node], graph.near.begin[node + 1]):
                    stale[graph.near.items[k]] = True
    if np.any(must):
        return chosen
    whole = options.first[rows]
    worse = _total(graph, options, rows, moves, whole, seconds) <= _total(
        graph, options, rows, moves, chosen, seconds
    )
    return whole if worse else chosen


@njit(cache=True)
def _total(
    graph: GraphArrays,
    options: OptionArrays,
    rows: Ints,
    moves: Moves,
    chosen: Ints,
    seconds: Floats,
) -> float:
    """Returns the seconds of all that is done under these options, sums of updates by minibatch."""
    wanted = np.zeros((len(graph.producers), len(moves.fixed) + 1), np.int32)
    total = 0.0
    for node in range(len(rows)):
        _count(graph, options, wanted, node, chosen[node], 1)
        divided = options.divides[chosen[node]]
        total += seconds[node] / moves.devices if divided else seconds[node]
        total += _seconds(moves, SUM, WHOLE, options.summed[chosen[node]])
    minibatch, update = np.zeros((1, len(moves.fixed))), np.zeros((1, len(moves.fixed)))
    for value in range(len(graph.producers)):
        source = _placed(graph, options, chosen, value)
        maker = graph.producers[value]
        own = options.bytes[options.bytes_at[rows[maker]] + graph.slots[value]]
        left = wanted[value, -1]
        for target in range(len(moves.fixed)):
            if not left:
                break
            left -= wanted[value, target]
            if wanted[value, target]:
                moved = graph.written[value] and source != target
                total += np.inf if moved else _seconds(moves, source, target, own)
        for e in range(graph.ends.begin[value], graph.ends.begin[value + 1]):
            kind, partner = graph.ends.items[e], graph.partners[e]
            target = _placed(graph, options, chosen, partner) if partner >= 0 else -1
            minibatch[0, source] = update[0, source] = 0.0
            _add_end(moves, own, kind, source, target, minibatch, update, 0, source)
            total += minibatch[0, source] + update[0, source] / moves.minibatches
    return total


@njit(cache=True)
def _less(keys: Floats, best: Floats) -> bool:
    for k in range(_KEYS):
        if keys[k] == best[k]:
            continue
        largest = max(abs(keys[k]), abs(best[k]))
        if np.isinf(largest) or abs(keys[k] - best[k]) > _CLOSE * largest:
            return bool(keys[k] < best[k])
    return False


@njit(inline="always")
def _count(
    graph: GraphArrays, options: OptionArrays, wanted: Counts, node: int, option: int, change: int
) -> None:
    """Counts by value and code the decided readers that want it so, and in the end all of them."""
    first = graph.reads.begin[node]
    for k in range(first, graph.reads.begin[node + 1]):
        code = options.codes[options.codes_at[option] + k - first]
        wanted[graph.reads.items[k], code] += change
        wanted[graph.reads.items[k], -1] += change


@njit(inline="always")
def _placed(graph: GraphArrays, options: OptionArrays, chosen: Ints, value: int) -> int:
    """Returns the code of the value where its node gives it; -1 while that is open."""
    option = chosen[graph.producers[value]]
    return -1 if option < 0 else options.codes[options.codes_at[option] + graph.slots[value]]


@njit(inline="always")
def _read_costs(
    graph: GraphArrays,
    options: OptionArrays,
    rows: Ints,
    moves: Moves,
    chosen: Ints,
    wanted: Counts,
    node: int,
    costs: Floats,
) -> None:
    """Sets the seconds that bring what the node reads to each placement."""
    first = graph.reads.begin[node]
    for k in range(first, graph.reads.begin[node + 1]):
        value, slot = graph.reads.items[k], k - first
        source = _placed(graph, options, chosen, value)
        place = options.bytes_at[rows[node]] + slot
        begin, end = options.first_code[place], options.first_code[place + 1]
        for c in range(begin, end):  # views of arrays would be counted, in each loop
            costs[slot, options.slot_codes[c]] = 0.0
        if source < 0:
            continue
        maker = options.bytes_at[rows[graph.producers[value]]] + graph.slots[value]
        own = min(options.bytes[place], options.bytes[maker])
        for c in range(begin, end):
            code = options.slot_codes[c]
            if graph.written[value] and code != source:
                costs[slot, code] = np.inf
            elif not wanted[value, code]:
                costs[slot, code] = _seconds(moves, source, code, own)


@njit(inline="always")
def _result_costs(  # noqa: C901
    graph: GraphArrays,
    options: OptionArrays,
    rows: Ints,
    moves: Moves,
    chosen: Ints,
    wanted: Counts,
    node: int,
    minibatch: Floats,
    update: Floats,
) -> None:
    """Sets the seconds that bring what the node gives, in each placement, to the decided readers
    and to where it ends, and its gradients to where it is: in each minibatch, and in each update.
    """
    first = graph.results.begin[node]
    reads = graph.reads.begin[node + 1] - graph.reads.begin[node]
    for k in range(first, graph.results.begin[node + 1]):
        value, slot, asked = graph.results.items[k], reads + k - first, False
        place = options.bytes_at[rows[node]] + slot
        begin, end = options.first_code[place], options.first_code[place + 1]
        own = options.bytes[place]
        for c in range(begin, end):
            code = options.slot_codes[c]
            minibatch[slot, code] = update[slot, code] = 0.0
        if value < 0:
            continue
        left = wanted[value, -1]
        for target in range(len(moves.fixed)):
            if not left:
                break
            left -= wanted[value, target]
            if wanted[value, target]:
                asked = asked or target != SUM
                for c in range(begin, end):
                    code = options.slot_codes[c]
                    moved = graph.written[value] and code != target
                    cost = np.inf if moved else _seconds(moves, code, target, own)
                    minibatch[slot, code] += cost
        for e in range(graph.ends.begin[value], graph.ends.begin[value + 1]):
            kind, partner, asked = graph.ends.items[e], graph.partners[e], True
            target = _placed(graph, options, chosen, partner) if partner >= 0 else -1
            for c in range(begin, end):
                code = options.slot_codes[c]
                _add_end(moves, own, kind, code, target, minibatch, update, slot, code)
        for e in range(graph.gradients.begin[value], graph.gradients.begin[value + 1]):
            source = _placed(graph, options, chosen, graph.gradients.items[e])
            if source >= 0:
                for c in range(begin, end):
                    code = options.slot_codes[c]
                    kind = graph.gradient_kinds[e]
                    _add_end(moves, own, kind, source, code, minibatch, update, slot, code)
        if not asked:
            partner, kind, target = graph.late[value], OUTPUT, WHOLE
            if partner >= 0:
                kind, target = PARAMETER_GRADIENT, _placed(graph, options, chosen, partner)
            for c in range(begin, end):
                code = options.slot_codes[c]
                if code == SUM or (partner >= 0 and target == WHOLE):
                    _add_end(moves, own, kind, code, target, minibatch, update, slot, code)
                elif partner >= 0 and code > SUM and target > SUM:
                    index = graph.indices[value, options.dims[code]]
                    if index != graph.indices[partner, options.dims[target]]:
                        moved = _seconds(moves, SUM, target, own / moves.devices)
                        minibatch[slot, code] += moved


@njit(cache=True)
def _add_end(
    moves: Moves,
    own: float,
    kind: int,
    source: int,
    target: int,
    minibatch: Floats,
    update: Floats,
    slot: int,
    code: int,
) -> None:
    """Adds what brings an output to where it ends, as `sharding.assignment.output_target`.
    `target`: of the parameter or input whose gradient it is; -1 while that is open.
    """
    if kind == OUTPUT:
        minibatch[slot, code] += _seconds(moves, source, WHOLE, own)
    elif kind == PARAMETER_GRADIENT and source == SUM and target <= WHOLE:
        update[slot, code] += _seconds(moves, SUM, WHOLE, own)
    elif target >= 0:
        minibatch[slot, code] += _seconds(moves, source, target, own)


@njit(inline="always")
def _seconds(moves: Moves, source: int, target: int, size: float) -> float:
    """Of a tensor of so many bytes."""
    seconds: float = moves.per_byte[source, target] * size
    return seconds + moves.fixed[source, target] if size else 0.0


@njit(cache=True)
def _family_sums(
    graph: GraphArrays, options: OptionArrays, rows: Ints, moves: Moves, chosen: Ints
) -> tuple[Ints, Floats, Floats]:
    """Returns for each heavy node and option the place, among the indices of the node's family, of
    the first one that the option divides, -1 for none; by node and place the fewest seconds that
    sums of what the node gives take if it is divided along that index; and by family and place all
    of these.
    """
    heavy = np.flatnonzero(graph.family >= 0)
    most = np.max(np.diff(graph.family_indices.begin))
    counts = options.first[rows + 1] - options.first[rows]
    places = np.full((len(heavy), np.max(counts)), -1, np.int64)
    own, sums = np.zeros((len(heavy), most)), np.zeros((len(graph.family_indices.begin) - 1, most))
    codes, codes_at, dims = options.codes, options.codes_at, options.dims
    for number, node in enumerate(heavy):
        if chosen[node] >= 0:
            continue
        values = np.append(
            graph.reads.items[graph.reads.begin[node] : graph.reads.begin[node + 1]],
            graph.results.items[graph.results.begin[node] : graph.results.begin[node + 1]],
        )
        reads = graph.reads.begin[node + 1] - graph.reads.begin[node]
        family, first = graph.family[node], options.first[rows[node]]
        begin, end = graph.family_indices.begin[family], graph.family_indices.begin[family + 1]
        indices, least = graph.family_indices.items[begin:end], np.full(most, np.inf)
        for option in range(first, first + counts[node]):
            place, summed = -1, 0.0
            for slot, value in enumerate(values):
                code = codes[codes_at[option] + slot]
                if place < 0 and dims[code] >= 0 and value >= 0:
                    place = np.searchsorted(indices, graph.indices[value, dims[code]])
                if slot >= reads and code == SUM:
                    size = options.bytes[options.bytes_at[rows[node]] + slot]
                    wait = moves.minibatches if value >= 0 and graph.late[value] >= 0 else 1.0
                    summed += _seconds(moves, SUM, WHOLE, size) / wait
            places[number, option - first] = place
            if place >= 0:
                least[place] = min(least[place], summed)
        own[number] = np.where(np.isfinite(least), least, 0.0)
        sums[family] += own[number]
    return places, own, sums

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

from pipedream.optimizer.recursive.graph import GraphArrays
from pipedream.optimizer.recursive.numbered import INPUT_GRADIENT, OUTPUT, PARAMETER_GRADIENT
from pipedream.optimizer.recursive.options import SUM, WHOLE, Floats, Ints, OptionArrays

Counts: TypeAlias = NDArray[np.int32]
Keys: TypeAlias = tuple[float, float, float, float, float, float]
_NO_KEYS = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
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
    chosen = _unknown(len(rows))
    devices, codes_count = moves.devices, len(moves.fixed)
    wanted = np.zeros((len(graph.producers), codes_count + 1), np.int32)
    given, placed = _given(graph, options, rows), _unknown(len(graph.producers))
    for node in range(len(rows)):
        if options.first[rows[node]] + 1 == options.first[rows[node] + 1]:
            chosen[node] = options.first[rows[node]]
            _count(graph, options, wanted, node, chosen[node], 1)
            _place(graph, options, placed, node, chosen[node])
    slots = _most(graph.reads.begin) + _most(graph.results.begin)
    costs = np.zeros((2, slots, codes_count))  # in each minibatch, in each update
    places, own_sums, sums = _family_sums(graph, options, rows, moves, chosen)
    index_of = _unknown(len(sums)) - 1
    family_seconds, share = np.zeros(len(sums)), 1.0
    for node in range(len(rows)):
        if graph.family[node] >= 0:
            family_seconds[graph.family[node]] += seconds[node]
    stale = np.zeros(len(rows), np.bool_)
    # whatever is taken out of a tuple is counted: here once, not for each node
    codes_at, codes, bytes_at = options.codes_at, options.codes, options.bytes_at
    bytes_, summed, divides = options.bytes, options.summed, options.divides
    first_option = options.first
    per_byte, fixed = moves.per_byte, moves.fixed
    reads_begin, results_begin = graph.reads.begin, graph.results.begin
    near_begin, near = graph.near.begin, graph.near.items
    families, heavy = graph.family, graph.heavy
    for sweep in range(sweeps + 1):
        for position in range(len(order)):
            node = order[position]
            row = rows[node]
            first, end = first_option[row], first_option[row + 1]
            if end - first == 1 or (sweep > 0 and not stale[node]):
                continue
            stale[node] = False
            if sweep > 0:
                _count(graph, options, wanted, node, chosen[node], -1)
            at = bytes_at[row]
            _read_costs(graph, options, moves, placed, given, wanted, node, at, costs)
            _result_costs(graph, options, moves, placed, wanted, node, at, costs)
            reads = reads_begin[node + 1] - reads_begin[node]
            results = results_begin[node + 1] - results_begin[node]
            before, chosen[node], best_work, best = chosen[node], -1, 0.0, _NO_KEYS
            family = families[node] if sweep == 0 else -1
            if family >= 0:
                for place in range(sums.shape[1]):
                    sums[family, place] -= own_sums[heavy[node], place]
                share = seconds[node] / family_seconds[family] if seconds[node] > 0.0 else 1.0
            for option in range(first, end):
                often, once, held = _seconds(per_byte, fixed, SUM, WHOLE, summed[option]), 0.0, 0.0
                for slot in range(reads + results):
                    code = codes[codes_at[option] + slot]
                    often += costs[0, slot, code]
                    if slot >= reads:
                        once += costs[1, slot, code]
                        own = bytes_[at + slot]
                        held += own / devices if code > SUM else own
                sent = often + once / moves.minibatches
                other = 0.0
                if family >= 0:
                    place = places[heavy[node], option - first]
                    if index_of[family] < -1:
                        sent += share * sums[family, place] if place >= 0 else 0.0
                    else:
                        other = 0.0 if place == index_of[family] else 1.0
                work = seconds[node] / devices if divides[option] else seconds[node]
                undone = 1.0 if must[node] and not divides[option] else 0.0
                if chosen[node] >= 0 and undone >= best[0] and sent + work > best[1] * _FAR:
                    continue
                whole = 0.0 if divides[option] else 1.0
                keys = undone, sent + work, other, often, whole, held
                better = chosen[node] < 0 or _less(keys, best)
                if better or (option == before and not _less(best, keys)):
                    chosen[node], best_work, best = option, work, keys
            _count(graph, options, wanted, node, chosen[node], 1)
            _place(graph, options, placed, node, chosen[node])
            if family >= 0 and index_of[family] < -1:
                index_of[family] = places[heavy[node], chosen[node] - first]
            if chosen[node] != before and (sweep > 0 or best[1] > best_work):
                for k in range(near_begin[node], near_begin[node + 1]):
                    stale[near[k]] = True
    for node in range(len(rows)):
        if must[node]:
            return chosen
    undivided = options.first[rows]
    worse = _total(graph, options, rows, moves, undivided, seconds) <= _total(
        graph, options, rows, moves, chosen, seconds
    )
    return undivided if worse else chosen


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
    per_byte, fixed, divides, summed = moves.per_byte, moves.fixed, options.divides, options.summed
    wanted = np.zeros((len(graph.producers), len(fixed) + 1), np.int32)
    given, placed = _given(graph, options, rows), _unknown(len(graph.producers))
    written, ends, total = graph.written, graph.ends.begin, 0.0
    for node in range(len(rows)):
        option = chosen[node]
        _count(graph, options, wanted, node, option, 1)
        _place(graph, options, placed, node, option)
        total += seconds[node] / moves.devices if divides[option] else seconds[node]
        total += _seconds(per_byte, fixed, SUM, WHOLE, summed[option])
    for value in range(len(placed)):
        source, own, left = placed[value], given[value], wanted[value, -1]
        for target in range(len(fixed)):
            if not left:
                break
            left -= wanted[value, target]
            if wanted[value, target]:
                moved = written[value] and source != target
                total += np.inf if moved else _seconds(per_byte, fixed, source, target, own)
        for e in range(ends[value], ends[value + 1]):
            kind, partner = graph.ends.items[e], graph.partners[e]
            target = placed[partner] if partner >= 0 else -1
            before, after, is_late = _end(kind, source, target)
            cost = _seconds(per_byte, fixed, before, after, own)
            total += cost / moves.minibatches if is_late else cost
    return total


@njit(cache=True)
def _less(keys: Keys, best: Keys) -> bool:
    for k in range(len(keys)):
        if keys[k] == best[k]:
            continue
        largest = max(abs(keys[k]), abs(best[k]))
        if np.isinf(largest) or abs(keys[k] - best[k]) > _CLOSE * largest:
            return bool(keys[k] < best[k])
    return False


@njit(cache=True)
def _count(
    graph: GraphArrays, options: OptionArrays, wanted: Counts, node: int, option: int, change: int
) -> None:
    """Counts by value and code the decided readers that want it so, and in the end all of them."""
    begin, items, codes = graph.reads.begin, graph.reads.items, options.codes
    first, at = begin[node], options.codes_at[option]
    for k in range(first, begin[node + 1]):
        code = codes[at + k - first]
        wanted[items[k], code] += change
        wanted[items[k], -1] += change


@njit(cache=True)
def _place(graph: GraphArrays, options: OptionArrays, placed: Ints, node: int, option: int) -> None:
    """Sets by value the code in which the node gives it."""
    begin, items, codes = graph.results.begin, graph.results.items, options.codes
    first = begin[node]
    at = options.codes_at[option] + graph.reads.begin[node + 1] - graph.reads.begin[node]
    for k in range(first, begin[node + 1]):
        if items[k] >= 0:
            placed[items[k]] = codes[at + k - first]


@njit(cache=True)
def _given(graph: GraphArrays, options: OptionArrays, rows: Ints) -> Floats:
    """Returns by value the bytes that a device has where it is given, before this axis."""
    given = np.zeros(len(graph.producers))
    for value in range(len(given)):
        given[value] = options.bytes[
            options.bytes_at[rows[graph.producers[value]]] + graph.slots[value]
        ]
    return given


@njit(cache=True)
def _read_costs(
    graph: GraphArrays,
    options: OptionArrays,
    moves: Moves,
    placed: Ints,
    given: Floats,
    wanted: Counts,
    node: int,
    at: int,
    costs: Floats,
) -> None:
    """Sets the seconds that bring what the node reads to each placement. `placed`, `given`,
    `wanted`: of each value the code in which it is given, -1 while that is open, its bytes there,
    and by code how many of the decided readers want it so. `at`: where the node's bytes are.
    """
    begin, items, written = graph.reads.begin, graph.reads.items, graph.written
    first_code, slot_codes, bytes_ = options.first_code, options.slot_codes, options.bytes
    per_byte, fixed = moves.per_byte, moves.fixed
    first = begin[node]
    for k in range(first, begin[node + 1]):
        value, slot = items[k], k - first
        source, place = placed[value], at + slot
        own = min(bytes_[place], given[value])
        for c in range(first_code[place], first_code[place + 1]):
            code = slot_codes[c]
            costs[0, slot, code] = 0.0
            if source < 0:
                continue
            if written[value] and code != source:
                costs[0, slot, code] = np.inf
            elif not wanted[value, code]:
                costs[0, slot, code] = _seconds(per_byte, fixed, source, code, own)


@njit(cache=True, error_model="numpy")  # what may raise counts references to all it is given
def _result_costs(  # noqa: C901
    graph: GraphArrays,
    options: OptionArrays,
    moves: Moves,
    placed: Ints,
    wanted: Counts,
    node: int,
    at: int,
    costs: Floats,
) -> None:
    """Sets the seconds that bring what the node gives, in each placement, to the decided readers
    and to where it ends, and its gradients to where it is: in each minibatch, and in each update.
    """
    begins, items, written = graph.results.begin, graph.results.items, graph.written
    ends, gradients, late = graph.ends.begin, graph.gradients.begin, graph.late
    first_code, slot_codes, bytes_ = options.first_code, options.slot_codes, options.bytes
    per_byte, fixed = moves.per_byte, moves.fixed
    first = begins[node]
    reads = graph.reads.begin[node + 1] - graph.reads.begin[node]
    for k in range(first, begins[node + 1]):
        value, slot, asked = items[k], reads + k - first, False
        begin, end = first_code[at + slot], first_code[at + slot + 1]
        own = bytes_[at + slot]
        for c in range(begin, end):
            code = slot_codes[c]
            costs[0, slot, code] = costs[1, slot, code] = 0.0
        if value < 0:
            continue
        left = wanted[value, -1]
        for target in range(len(fixed)):
            if not left:
                break
            left -= wanted[value, target]
            if wanted[value, target]:
                asked = asked or target != SUM
                for c in range(begin, end):
                    code = slot_codes[c]
                    moved = written[value] and code != target
                    cost = np.inf if moved else _seconds(per_byte, fixed, code, target, own)
                    costs[0, slot, code] += cost
        for e in range(ends[value], ends[value + 1]):
            kind, partner, asked = graph.ends.items[e], graph.partners[e], True
            target = placed[partner] if partner >= 0 else -1
            for c in range(begin, end):
                code = slot_codes[c]
                before, after, is_late = _end(kind, code, target)
                costs[int(is_late), slot, code] += _seconds(per_byte, fixed, before, after, own)
        for e in range(gradients[value], gradients[value + 1]):
            source, kind = placed[graph.gradients.items[e]], graph.gradient_kinds[e]
            if source >= 0:
                for c in range(begin, end):
                    code = slot_codes[c]
                    before, after, is_late = _end(kind, source, code)
                    costs[int(is_late), slot, code] += _seconds(per_byte, fixed, before, after, own)
        if not asked:
            partner, kind, target = late[value], OUTPUT, WHOLE
            if partner >= 0:
                kind, target = PARAMETER_GRADIENT, placed[partner]
            for c in range(begin, end):
                code = slot_codes[c]
                if code == SUM or (partner >= 0 and target == WHOLE):
                    before, after, is_late = _end(kind, code, target)
                    costs[int(is_late), slot, code] += _seconds(per_byte, fixed, before, after, own)
                elif partner >= 0 and code > SUM and target > SUM:
                    index = graph.indices[value, options.dims[code]]
                    if index != graph.indices[partner, options.dims[target]]:
                        size = own / moves.devices
                        costs[0, slot, code] += _seconds(per_byte, fixed, SUM, target, size)


@njit(cache=True)
def _end(kind: int, source: int, target: int) -> tuple[int, int, bool]:
    """Returns from which code to which an output is brought to where it ends, as
    `sharding.assignment.output_target`, and whether that is once per update. `target`: of the
    parameter or input whose gradient it is; -1 while that is open, and then in what is returned.
    """
    if kind == OUTPUT:
        return source, WHOLE, False
    if kind == PARAMETER_GRADIENT and source == SUM and target <= WHOLE:
        return SUM, WHOLE, True
    return source, target, False


@njit(cache=True)
def _seconds(per_byte: Floats, fixed: Floats, source: int, target: int, size: float) -> float:
    """Of a tensor of so many bytes; none where it is open to which code it is brought."""
    if target < 0 or not size:
        return 0.0
    seconds: float = per_byte[source, target] * size + fixed[source, target]
    return seconds


@njit(cache=True)
def _family_sums(  # noqa: C901
    graph: GraphArrays, options: OptionArrays, rows: Ints, moves: Moves, chosen: Ints
) -> tuple[Ints, Floats, Floats]:
    """Returns for each heavy node and option the place, among the indices of the node's family, of
    the first one that the option divides, -1 for none; by node and place the fewest seconds that
    sums of what the node gives take if it is divided along that index; and by family and place all
    of these.
    """
    heavy, counts = 0, 0
    for node in range(len(rows)):
        heavy = max(heavy, graph.heavy[node] + 1)
        counts = max(counts, options.first[rows[node] + 1] - options.first[rows[node]])
    begins, family_indices = graph.family_indices.begin, graph.family_indices.items
    most = _most(begins)
    places = _unknown(heavy * counts).reshape((heavy, counts))
    own, sums = np.zeros((heavy, most)), np.zeros((len(begins) - 1, most))
    codes, codes_at, dims = options.codes, options.codes_at, options.dims
    for node in range(len(rows)):
        number, family = graph.heavy[node], graph.family[node]
        if number < 0 or chosen[node] >= 0:
            continue
        first_read, first_result = graph.reads.begin[node], graph.results.begin[node]
        reads = graph.reads.begin[node + 1] - first_read
        slots = reads + graph.results.begin[node + 1] - first_result
        first = options.first[rows[node]]
        least = np.zeros(most) + np.inf
        for option in range(first, options.first[rows[node] + 1]):
            place, summed = -1, 0.0
            for slot in range(slots):
                code = codes[codes_at[option] + slot]
                if slot < reads:
                    value = graph.reads.items[first_read + slot]
                else:
                    value = graph.results.items[first_result + slot - reads]
                if place < 0 and dims[code] >= 0 and value >= 0:
                    place = 0
                    while family_indices[begins[family] + place] < graph.indices[value, dims[code]]:
                        place += 1
                if slot >= reads and code == SUM:
                    size = options.bytes[options.bytes_at[rows[node]] + slot]
                    wait = moves.minibatches if value >= 0 and graph.late[value] >= 0 else 1.0
                    summed += _seconds(moves.per_byte, moves.fixed, SUM, WHOLE, size) / wait
            places[number, option - first] = place
            if place >= 0:
                least[place] = min(least[place], summed)
        for place in range(most):
            if least[place] < np.inf:
                own[number, place] = least[place]
                sums[family, place] += least[place]
    return places, own, sums


@njit(cache=True)
def _unknown(count: int) -> Ints:
    """Returns -1 so many times; numpy's own takes seconds to compile."""
    numbers = np.empty(count, np.int64)
    for k in range(count):
        numbers[k] = -1
    return numbers


@njit(cache=True)
def _most(begin: Ints) -> int:
    """Returns how long the longest of these lists is."""
    most = 0
    for k in range(len(begin) - 1):
        most = max(most, begin[k + 1] - begin[k])
    return most

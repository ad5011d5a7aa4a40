"""Each node in turn takes the option that costs least next to what is decided around it.

Costs are relative: bytes that a device sends (of its part of a tensor before this axis, times what
the collective takes of it: `OptionTable.relative_costs`) over the bandwidth of the axis, and the
seconds of its work. Of an option p of node v

    cost(v, p) =   redistributions of what v reads, unless another reader has it so already,
                 + redistributions of what v gives to the decided readers, once for each placement
                 + sums of what v gives that nobody has asked for yet
                 + sums within v, and those of the family of v (its gradients) if they are divided
                   along the same index
                 + seconds(v) / devices if p divides v, else seconds(v)

Where costs are equal, fewer bytes in each minibatch count (sums of gradients of parameters are made
once per update), then divided work, then fewer bytes held.
"""

from __future__ import annotations

from typing import TypeAlias

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
_KEYS = 5
_CLOSE = 1e-9
assert (OUTPUT, INPUT_GRADIENT, PARAMETER_GRADIENT, WHOLE, SUM) == (0, 1, 2, 0, 1)


@njit(cache=True)
def decide(  # noqa: C901 a kernel, in one piece to be fast
    graph: GraphArrays,
    options: OptionArrays,
    order: Ints,
    rows: Ints,
    relative: Floats,
    per_byte: float,
    devices: int,
    seconds: Floats,
    must: Ints,
    sweeps: int,
) -> Ints:
    """Returns the option of each node. `rows`: by node; `relative`: of one code to another;
    `seconds`: of the work of each node before this axis; `must`: whether it is to be divided if it
    can be, whatever that costs. After the first decision a node is looked at again, at most
    `sweeps` times, if one next to it has changed, or sends something after its first decision.
    """
    chosen = np.full(len(rows), -1, np.int64)
    wanted = np.zeros((len(graph.producers), len(relative)), np.int32)
    for node in range(len(rows)):
        if options.first[rows[node]] + 1 == options.first[rows[node] + 1]:
            chosen[node] = options.first[rows[node]]
            _count(graph, options, wanted, node, chosen[node], 1)
    slots = np.max(np.diff(graph.reads.begin)) + np.max(np.diff(graph.results.begin))
    minibatch = np.zeros((slots, len(relative)))
    update = np.zeros((slots, len(relative)))
    best, keys = np.zeros(_KEYS), np.zeros(_KEYS)
    places, own_sums, sums = _family_sums(graph, options, rows, chosen)
    stale = np.zeros(len(rows), np.bool_)
    codes_at, codes, bytes_at = options.codes_at, options.codes, options.bytes_at
    bytes_, summed, divides = options.bytes, options.summed, options.divides
    whole = relative[SUM, WHOLE]
    for sweep in range(sweeps + 1):
        for node in order:
            row = rows[node]
            first, end = options.first[row], options.first[row + 1]
            if end - first == 1 or (sweep > 0 and not stale[node]):
                continue
            stale[node] = False
            if sweep > 0:
                _count(graph, options, wanted, node, chosen[node], -1)
            _read_costs(graph, options, rows, relative, chosen, wanted, node, minibatch)
            _result_costs(graph, options, rows, relative, chosen, wanted, node, minibatch, update)
            reads = graph.reads.begin[node + 1] - graph.reads.begin[node]
            results = graph.results.begin[node + 1] - graph.results.begin[node]
            before, chosen[node], best_work = chosen[node], -1, 0.0
            family = graph.family[node] if sweep == 0 else -1
            if family >= 0:
                sums[family] -= own_sums[graph.heavy[node]]
            for option in range(first, end):
                often, once, held = summed[option] * whole, 0.0, 0.0
                for slot in range(reads + results):
                    code = codes[codes_at[option] + slot]
                    often += minibatch[slot, code]
                    if slot >= reads:
                        once += update[slot, code]
                        own = bytes_[bytes_at[row] + slot]
                        held += own / devices if code > SUM else own
                sent = often + once
                if family >= 0:
                    place = places[graph.heavy[node], option - first]
                    sent += sums[family, place] * whole if place >= 0 else 0.0
                work = seconds[node] / devices if divides[option] else seconds[node]
                keys[0] = 1.0 if must[node] and not divides[option] else 0.0
                keys[1] = sent * per_byte + work
                keys[2] = often
                keys[3] = 0.0 if divides[option] else 1.0
                keys[4] = held
                better = chosen[node] < 0 or _less(keys, best)
                if better or (option == before and not _less(best, keys)):
                    chosen[node], best_work = option, work
                    best[:] = keys
            _count(graph, options, wanted, node, chosen[node], 1)
            if chosen[node] != before and (sweep > 0 or best[1] > best_work):
                for k in range(graph.near.begin[node], graph.near.begin[node + 1]):
                    stale[graph.near.items[k]] = True
    return chosen


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
    """Counts by value and code the decided readers that want it so."""
    first = graph.reads.begin[node]
    for k in range(first, graph.reads.begin[node + 1]):
        code = options.codes[options.codes_at[option] + k - first]
        wanted[graph.reads.items[k], code] += change


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
    relative: Floats,
    chosen: Ints,
    wanted: Counts,
    node: int,
    costs: Floats,
) -> None:
    """Sets the bytes that bring what the node reads to each placement."""
    first = graph.reads.begin[node]
    for k in range(first, graph.reads.begin[node + 1]):
        value, slot = graph.reads.items[k], k - first
        source = _placed(graph, options, chosen, value)
        place = options.bytes_at[rows[node]] + slot
        codes = options.slot_codes[options.first_code[place] : options.first_code[place + 1]]
        for code in codes:
            costs[slot, code] = 0.0
        if source < 0:
            continue
        maker = options.bytes_at[rows[graph.producers[value]]] + graph.slots[value]
        own = min(options.bytes[place], options.bytes[maker])
        for code in codes:
            if graph.written[value] and code != source:
                costs[slot, code] = np.inf
            elif not wanted[value, code]:
                costs[slot, code] = own * relative[source, code]


@njit(inline="always")
def _result_costs(  # noqa: C901
    graph: GraphArrays,
    options: OptionArrays,
    rows: Ints,
    relative: Floats,
    chosen: Ints,
    wanted: Counts,
    node: int,
    minibatch: Floats,
    update: Floats,
) -> None:
    """Sets the bytes that bring what the node gives, in each placement, to the decided readers and
    to where it ends, and its gradients to where it is: in each minibatch, and in each update.
    """
    first = graph.results.begin[node]
    reads = graph.reads.begin[node + 1] - graph.reads.begin[node]
    for k in range(first, graph.results.begin[node + 1]):
        value, slot, asked = graph.results.items[k], reads + k - first, False
        place = options.bytes_at[rows[node]] + slot
        codes = options.slot_codes[options.first_code[place] : options.first_code[place + 1]]
        for code in codes:
            minibatch[slot, code] = update[slot, code] = 0.0
        if value < 0:
            continue
        for target in range(len(relative)):
            if wanted[value, target]:
                asked = asked or target != SUM
                for code in codes:
                    moved = graph.written[value] and code != target
                    minibatch[slot, code] += np.inf if moved else relative[code, target]
        for e in range(graph.ends.begin[value], graph.ends.begin[value + 1]):
            kind, partner, asked = graph.ends.items[e], graph.partners[e], True
            target = _placed(graph, options, chosen, partner) if partner >= 0 else -1
            for code in codes:
                _add_end(relative, kind, code, target, minibatch, update, slot, code)
        for e in range(graph.gradients.begin[value], graph.gradients.begin[value + 1]):
            source = _placed(graph, options, chosen, graph.gradients.items[e])
            if source >= 0:
                for code in codes:
                    kind = graph.gradient_kinds[e]
                    _add_end(relative, kind, source, code, minibatch, update, slot, code)
        if not asked:
            minibatch[slot, SUM] += relative[SUM, WHOLE]
        own = max(1.0, options.bytes[place])  # 0 x inf is no number
        for code in codes:
            minibatch[slot, code] *= own
            update[slot, code] *= own


@njit(cache=True)
def _add_end(
    relative: Floats,
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
        minibatch[slot, code] += relative[source, WHOLE]
    elif kind == PARAMETER_GRADIENT and source == SUM and target <= WHOLE:
        update[slot, code] += relative[SUM, WHOLE]
    elif target >= 0:
        minibatch[slot, code] += relative[source, target]


@njit(cache=True)
def _family_sums(
    graph: GraphArrays, options: OptionArrays, rows: Ints, chosen: Ints
) -> tuple[Ints, Floats, Floats]:
    """Returns for each heavy node and option the place, among the indices of the node's family, of
    the first one that the option divides, -1 for none; by node and place the fewest bytes that the
    node gives as sums if it is divided along that index; and by family and place all of these.
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
                    summed += options.bytes[options.bytes_at[rows[node]] + slot]
            places[number, option - first] = place
            if place >= 0:
                least[place] = min(least[place], summed)
        own[number] = np.where(np.isfinite(least), least, 0.0)
        sums[family] += own[number]
    return places, own, sums

"""The best labels of a problem exactly, one variable after the other (bucket elimination).

A variable is eliminated by the table of its best label for all labels of its neighbours (Dechter,
"Bucket Elimination", 1999). The order is greedy: next whichever makes the smallest table.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

import numpy as np

from pipedream.optimizer.intra.solver.problem import Floats, Ints, Problem, Value

MOST_ENTRIES = 1 << 22
"""Of one table; of all tables so many times as many."""
_ALL = 8


@dataclass(frozen=True)
class _Table:
    """`costs[label of variables[0], ...]`."""

    variables: tuple[int, ...]
    costs: Floats


def eliminate(problem: Problem, price: float = 0.0) -> Ints | None:
    """The labels of least seconds, with a byte at `price` seconds, whatever the limit of bytes;
    None if a table would have more than `MOST_ENTRIES`.
    """
    sizes = [len(own) for own in problem.seconds]
    scopes = [_scope(value, sizes) for value in problem.values]
    if any(prod(sizes[v] for v in scope) > MOST_ENTRIES for scope in scopes):
        return None
    order = _order(sizes, scopes)
    if order is None:
        return None
    tables: list[_Table] = [
        _Table((v,), own + price * held)
        for v, (own, held) in enumerate(zip(problem.seconds, problem.bytes, strict=True))
    ]
    tables += (
        _table(value, scope, sizes, price)
        for value, scope in zip(problem.values, scopes, strict=True)
        if scope
    )
    return _labels(order, tables, sizes)


def _scope(value: Value, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(v for v in (value.source, *value.readers) if sizes[v] > 1))


def _order(sizes: Sequence[int], scopes: Sequence[tuple[int, ...]]) -> list[int] | None:
    """An order in which to eliminate; None if the tables become too large."""
    near: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for v in scope:
            near[v].update(scope)
    entries = [prod(sizes[w] for w in {v, *own}) for v, own in enumerate(near)]
    heap = [(count, v) for v, count in enumerate(entries)]
    heapq.heapify(heap)
    order, done, total = list[int](), set[int](), 0
    while heap:
        count, v = heapq.heappop(heap)
        if v in done or count != entries[v]:
            continue
        total += count
        if count > MOST_ENTRIES or total > _ALL * MOST_ENTRIES:
            return None
        order.append(v)
        done.add(v)
        others = near[v] - {v}
        for w in others:
            near[w] = (near[w] | others) - {v}
            entries[w] = prod(sizes[u] for u in near[w])
            heapq.heappush(heap, (entries[w], w))
    return order


def _table(value: Value, scope: tuple[int, ...], sizes: Sequence[int], price: float) -> _Table:
    axis = {v: k for k, v in enumerate(scope)}

    def along(variable: int, places: Ints) -> Ints:
        shape = [1] * len(scope)
        if variable in axis:
            shape[axis[variable]] = sizes[variable]
        return places.reshape(shape)

    wanted = [along(v, own) for v, own in zip(value.readers, value.wanted, strict=True)]
    seconds, held = value.cost(along(value.source, value.given), wanted)
    return _Table(scope, np.broadcast_to(seconds + price * held, [sizes[v] for v in scope]))


def _labels(order: Sequence[int], tables: Sequence[_Table], sizes: Sequence[int]) -> Ints:
    """Eliminates, then reads off the best labels from the last variable to the first."""
    # best[v](labels of others) = argmin over x of the sum of all tables with v, at v = x
    buckets: list[list[_Table]] = [[] for _ in sizes]
    place = {v: k for k, v in enumerate(order)}
    for table in tables:
        buckets[min(table.variables, key=place.__getitem__)].append(table)
    best: dict[int, _Table] = {}
    for v in order:
        joined = reduce(lambda one, other: _add(one, other, sizes), buckets[v])
        axis = joined.variables.index(v)
        others = tuple(each for each in joined.variables if each != v)
        best[v] = _Table(others, joined.costs.argmin(axis=axis))
        if others:
            message = _Table(others, joined.costs.min(axis=axis))
            buckets[min(others, key=place.__getitem__)].append(message)
    labels = np.zeros(len(sizes), dtype=np.intp)
    for v in reversed(order):
        labels[v] = best[v].costs[tuple(labels[w] for w in best[v].variables)]
    return labels


def _add(one: _Table, other: _Table, sizes: Sequence[int]) -> _Table:
    variables = tuple(sorted({*one.variables, *other.variables}))
    parts = (_spread(each, variables, sizes) for each in (one, other))
    return _Table(variables, np.add(*parts))


def _spread(table: _Table, variables: Sequence[int], sizes: Sequence[int]) -> Floats:
    """The table with an axis for each of these variables; its own are sorted."""
    shape = [sizes[v] if v in table.variables else 1 for v in variables]
    return table.costs.reshape(shape)

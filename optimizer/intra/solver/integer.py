"""The same problem as an integer program, for scipy's HiGHS: what message passing and elimination
leave, and a reference for both.

As Alpa's (Zheng et al., OSDI 2022, section 4.2), with the products of choices made linear by a
transport from the labels of the source of a value to those of a reader:

    x[v, l]        1 if variable v has label l; their sum is 1
    t[k, g, p]     1 if the source gives g and reader k wants p; sums over p and g are those of x
    y[g, p] >= t   1 if the value is moved from g to p, whoever wants it: costs seconds[g, p]
    s[g] >= t      1 if the form that was given is kept
    h[g, p]        1 if the form p, which the forward pass brings, is kept
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from pipedream.optimizer.intra.solver.problem import Floats, Ints, Problem, Value


@dataclass(frozen=True)
class IntegerSolution:
    """`labels`: None if no choice keeps the limit of bytes, or none was found in time; `bound`:
    seconds that none takes less than.
    """

    labels: Ints | None
    bound: float


def integer_program(problem: Problem, seconds: float | None = None) -> IntegerSolution:
    """The labels of least seconds within the limit of bytes, searched for at most so long."""
    program = _Program(problem)
    program.build()
    return program.solve(seconds)


def column_count(problem: Problem) -> int:
    """About how many columns the program has."""
    tables = (value.seconds.size * (2 + len(value.readers)) for value in problem.values)
    return sum(map(len, problem.seconds)) + sum(tables)


@dataclass
class _Program:
    """Columns and rows as they come. `rows`: least, most, and the entries (column, factor)."""

    problem: Problem
    costs: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[float, float, list[tuple[int, float]]]] = field(default_factory=list)
    labels: list[list[int]] = field(default_factory=list)

    def build(self) -> None:
        for own, held in zip(self.problem.seconds, self.problem.bytes, strict=True):
            columns = [
                self._column(float(cost) if possible else 0.0, float(size), whole=True)
                for cost, size, possible in zip(own, held, np.isfinite(own), strict=True)
            ]
            self.labels.append(columns)
            possible = [c for c, cost in zip(columns, own, strict=True) if np.isfinite(cost)]
            self._row(1, 1, [(column, 1.0) for column in possible])
            impossible = [(c, 1.0) for c in columns if c not in possible]
            self._row(0, 0, impossible)
        for value in self.problem.values:
            self._add(value)
        if self.problem.limit is not None:
            entries = [(k, size) for k, size in enumerate(self.bytes) if size]
            self._row(-np.inf, self.problem.limit, entries)

    def solve(self, seconds: float | None) -> IntegerSolution:
        from scipy.optimize import Bounds, LinearConstraint, milp  # takes long, is seldom needed
        from scipy.sparse import coo_array

        entries = [
            (row, column, factor)
            for row, (_, _, own) in enumerate(self.rows)
            for column, factor in own
        ]
        rows, columns, factors = zip(*entries, strict=True)
        matrix = coo_array((factors, (rows, columns)), shape=(len(self.rows), len(self.costs)))
        least, most, _ = zip(*self.rows, strict=True)
        scale = max(max(self.costs), 1e-30)
        options: dict[str, object] = {"mip_rel_gap": 1e-9}
        if seconds is not None:
            options["time_limit"] = seconds
        found = milp(
            np.array(self.costs) / scale,
            integrality=np.array(self.whole, dtype=np.intp),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix.tocsc(), least, most),
            options=options,
        )
        bound = -np.inf if found.mip_dual_bound is None else found.mip_dual_bound * scale
        if found.x is None:
            return IntegerSolution(None, np.inf if found.status == 2 else bound)
        labels = [int(np.argmax(found.x[columns])) for columns in self.labels]
        return IntegerSolution(np.array(labels, dtype=np.intp), bound)

    def _add(self, value: Value) -> None:
        given, wanted = value.seconds.shape
        moved = self._table(value.seconds)
        kept = self._table(np.zeros((given, wanted)), value.wanted_bytes[None].repeat(given, 0))
        source = [self._column(0.0, float(size)) for size in value.given_bytes]
        forms = self._numbers(value.source, value.given, given)
        transports = []
        for reader, own in zip(value.readers, value.wanted, strict=True):
            transport = self._table(np.zeros((given, wanted)))
            self._sums(transport, forms)
            self._sums(transport.T, self._numbers(reader, own, wanted))
            for one, other in zip(moved.flat, transport.flat, strict=True):
                self._at_least(int(one), [int(other)])
            transports.append(transport)
        if value.keeps:
            self._keep(value, transports, kept, source)

    def _keep(self, value: Value, transports: list[Ints], kept: Ints, source: list[int]) -> None:
        forward, backward = (
            [t for t, when in zip(transports, value.backward, strict=True) if when == which]
            for which in (False, True)
        )
        for late in backward:
            for g, p in np.ndindex(*late.shape):
                early = [int(each[g, p]) for each in forward]
                if p == value.same[g]:
                    self._at_least(source[g], [int(late[g, p])])
                    continue
                self._at_least(source[g], [int(late[g, p])], early)
                for each in early:  # kept >= late + early - 1
                    entries = [(int(kept[g, p]), 1.0), (int(late[g, p]), -1.0), (each, -1.0)]
                    self._row(-1, np.inf, entries)

    def _numbers(self, variable: int, places: Ints, count: int) -> list[list[int]]:
        """The columns of a variable's labels by placement."""
        columns = self.labels[variable]
        return [[columns[label] for label in np.flatnonzero(places == p)] for p in range(count)]

    def _sums(self, transport: Ints, labels: list[list[int]]) -> None:
        for row, own in zip(transport, labels, strict=True):
            self._row(0, 0, [*((int(c), 1.0) for c in row), *((c, -1.0) for c in own)])

    def _at_least(self, column: int, others: Iterable[int], without: Iterable[int] = ()) -> None:
        entries = [(column, 1.0), *((c, -1.0) for c in others), *((c, 1.0) for c in without)]
        self._row(0, np.inf, entries)

    def _table(self, seconds: Floats, held: Floats | None = None) -> Ints:
        """A column for each entry; those with infinite seconds are 0."""
        columns = np.zeros(seconds.shape, dtype=np.intp)
        for place in np.ndindex(*seconds.shape):
            cost = float(seconds[place])
            size = 0.0 if held is None else float(held[place])
            column = self._column(cost if np.isfinite(cost) else 0.0, size)
            columns[place] = column
            if not np.isfinite(cost):
                self._row(0, 0, [(column, 1.0)])
        return columns

    def _column(self, cost: float, held: float = 0.0, whole: bool = False) -> int:
        self.costs.append(cost)
        self.bytes.append(held)
        self.whole.append(whole)
        return len(self.costs) - 1

    def _row(self, least: float, most: float, entries: list[tuple[int, float]]) -> None:
        if entries:
            self.rows.append((least, most, entries))

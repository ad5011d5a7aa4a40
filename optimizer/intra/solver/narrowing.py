"""A smaller problem: without labels that are ruled out, and without placements that none has then.

Its tables are smaller by the square, and so is the work of message passing. What is left also knows
more: a label whose bound was low for the sake of a neighbour's that is ruled out is so soon, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipedream.optimizer.intra.solver.problem import Floats, Ints, Problem, Value


@dataclass(frozen=True, eq=False)
class Narrowed:
    """`given[value]`, `wanted[value]`: the placements that are left, by their numbers before."""

    problem: Problem
    given: Sequence[Ints]
    wanted: Sequence[Ints]


def narrow(problem: Problem, alive: Sequence[Ints]) -> Narrowed:
    """The problem with these labels of each variable, at least one."""
    restricted, tables = problem.restricted(alive), _Tables()
    given = [np.unique(value.given) for value in restricted.values]
    wanted = [np.unique(np.concatenate(value.wanted)) for value in restricted.values]
    left = zip(restricted.values, given, wanted, strict=True)
    values = [tables.narrowed(value, *own) for value, *own in left]
    return Narrowed(replace(restricted, values=values), given, wanted)


@dataclass
class _Tables:
    """Values that share their tables still do: messages are built upon each only once."""

    known: dict[object, tuple[Floats, Floats, Floats, Ints]] = field(default_factory=dict)

    def narrowed(self, value: Value, given: Ints, wanted: Ints) -> Value:
        tables = value.seconds, value.given_bytes, value.wanted_bytes, value.same
        key = (*map(id, tables), given.tobytes(), wanted.tobytes())
        if key not in self.known:
            self.known[key] = (
                value.seconds[np.ix_(given, wanted)],
                value.given_bytes[given],
                value.wanted_bytes[wanted],
                _places(value.same[given], wanted),
            )
        seconds, given_bytes, wanted_bytes, same = self.known[key]
        return replace(
            value,
            given=np.searchsorted(given, value.given),
            wanted=tuple(np.searchsorted(wanted, own) for own in value.wanted),
            seconds=seconds,
            given_bytes=given_bytes,
            wanted_bytes=wanted_bytes,
            same=same,
        )


def _places(numbers: Ints, left: Ints) -> Ints:
    """Where among those that are left each of these is, else -1."""
    return np.where(np.isin(numbers, left), np.searchsorted(left, numbers), -1)

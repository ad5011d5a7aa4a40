"""The operators that devices have where others are divided, timed as one device runs them.

Collectives are left out. Whole operators are timed too: a planner takes ratios
(`sharding.local_times`).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping

from pipedream.graph.placements.operators import Operator, OperatorGraph, TimedOperator
from pipedream.graph.plan import Plan
from pipedream.profiler.timing.local_parts import (
    DividedOperator,
    all_parts,
    likely_parts,
    planned_parts,
    worth_most,
)
from pipedream.profiler.timing.operator_times import largest_first
from pipedream.profiler.timing.stopping_rule import no_garbage_collection
from pipedream.sharding.axis import chunk_numbers

Shards = tuple[int, ...] | Plan | None
"""Numbers of devices whose parts of operators are timed, in each way to divide one. A plan: the
parts of its stages, and what None stands for: halves of the operators that take most, then what
else two, four and eight devices are likely to have, as far as time allows.
"""

_WORTH, _MOST = 0.99, 0.9
"""Of the seconds of all operators: the operators that make up so much are timed where they are
asked for or time allows; and in any case, where nobody asked.
"""
_LIKELY_SECONDS = 30.0
"""After so many no more are timed of those that are only likely."""
_SECONDS, _SECONDS_OF_LIKELY = 0.03, 0.1
"""After so many an operator is not repeated further in a round; one that is likely, at all."""
_ROUNDS = 3
"""In each of which wholes are timed, then parts. For seconds at a time processes may have half the
bandwidth of memory that they have before and after, and all of either would be timed in those.
"""


def time_local_operators(
    graph: OperatorGraph,
    nodes: Mapping[str, str],
    seconds: Mapping[str, float],
    shards: Shards,
    alone: Callable[..., Mapping[Operator, float | None]],
    at_once: Callable[..., Mapping[Operator, float | None]],
) -> tuple[TimedOperator, ...]:
    """Returns the seconds of whole and of local operators, for so many devices.

    `nodes`, `seconds`: of the calls of the graph, by name. `alone`: gives the seconds of operators,
    `enough` of them for each, and begins with no other after `limit`; None for one that cannot be
    run by itself, which is left out. `at_once`: the same of parts, which the devices of a mesh do
    at the same time.
    """
    of_operator: dict[Operator, float] = defaultdict(float)
    for call in graph.calls:
        of_operator[call.operator] += seconds.get(call.name, 0.0)
    asked, likely = _asked_and_likely(of_operator, shards, graph, nodes)
    divided = largest_first(dict.fromkeys(whole for whole, _ in (*asked, *likely)))
    parts = largest_first(dict.fromkeys(part for _, part in asked if part not in divided))
    timed: dict[Operator, list[float | None]] = defaultdict(list)

    def note(found: Mapping[Operator, float | None]) -> None:
        for operator, taken in found.items():
            timed[operator].append(taken)

    asked_for = {*divided, *parts}
    rest = dict.fromkeys(part for _, part in likely if part not in asked_for)
    with no_garbage_collection():  # once, not in each round
        for _ in range(_ROUNDS):
            note(alone(divided, enough=_SECONDS, limit=math.inf))
            note(at_once(parts, enough=_SECONDS, limit=math.inf))
        note(at_once(list(rest), enough=_SECONDS_OF_LIKELY, limit=_LIKELY_SECONDS))
    return tuple(
        TimedOperator(operator=operator, seconds=statistics.median(known))
        for operator, taken in timed.items()
        if (known := [each for each in taken if each is not None])
    )


def _asked_and_likely(
    of_operator: Mapping[Operator, float],
    shards: Shards,
    graph: OperatorGraph,
    nodes: Mapping[str, str],
) -> tuple[list[DividedOperator], list[DividedOperator]]:
    """Returns what is timed, and what is timed as far as time allows."""
    heaviest = {each: of_operator[each] for each in worth_most(of_operator, _WORTH)}
    chunks = chunk_numbers(dict.fromkeys(of_operator, 1), 2, ())
    if isinstance(shards, tuple):
        return list(all_parts(heaviest, shards, chunks)), []
    asked = list(all_parts(worth_most(of_operator, _MOST), (2,), chunks))
    if isinstance(shards, Plan):
        planned = planned_parts(shards, graph, nodes)
        asked += (each for each in planned if each.whole in heaviest)
    return asked, likely_parts(heaviest, chunks)

"""The order found for measured times, within a limit of memory.

Candidates are the orders of the literature that have room, the same with the gradients of weights
put where these times leave gaps (`deferred.py`), and those of a list scheduler under several rules
(`greedy.py`). The best of them are improved pass by pass (`improved.py`), the very best is
perturbed and improved again. All of it is a function of the spec: every rank comes to the same
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from math import inf
from operator import itemgetter
from random import Random

from pipedream.schedule.action import Kind
from pipedream.schedule.orders.deferred import deferred
from pipedream.schedule.orders.greedy import Rule, greedy
from pipedream.schedule.orders.improved import improved, perturbed
from pipedream.schedule.orders.literature import literature
from pipedream.schedule.orders.passes import Round
from pipedream.schedule.orders.timing import Numbers, Timing, halved
from pipedream.schedule.spec import PipelineSpec

EFFORT = 1_200_000
"""Passes that are timed: about a second."""

_SHARES_OF_EFFORT = 4
"""Candidates that share the effort; more where they need less."""

_RESTARTS = 8
"""Times that the best order is perturbed and improved again, where effort is left."""

_PATIENCE_VALUES = (0.5, 0.0, 1.0)
_EAGER_VALUES = (inf, 2.0, 1.5, 1.0)
_COST_OF_RULE = 40
"""A list scheduler takes about so many times as long as its order takes to be timed."""


def auto(spec: PipelineSpec, microbatches: int) -> Round:
    """Returns the best order found. There has to be room for one: see `has_room`."""
    timing = Timing.of_halves(spec, microbatches)
    candidates = [
        (timing.seconds_of_round(order)[0], order) for order in _candidates(timing, microbatches)
    ]
    candidates.sort(key=itemgetter(0))
    best, left = candidates[0], EFFORT
    for _, order in candidates:
        seconds, better, spent = improved(timing, order, min(left, EFFORT // _SHARES_OF_EFFORT))
        best = min(best, (seconds, better), key=itemgetter(0))
        left -= spent
        if left <= 0:
            break
    chance = Random(0)
    for _ in range(_RESTARTS if left > 0 else 0):
        order = perturbed(timing, best[1], chance)
        seconds, better, spent = improved(timing, order, left)
        best = min(best, (seconds, better), key=itemgetter(0))
        left -= spent
    return timing.round(best[1])


def has_room(spec: PipelineSpec) -> bool:
    """Tells whether each place has room for one microbatch of all its stages."""
    times = spec.pass_times
    limits = times.limit or (inf,) * len(spec.places)
    return all(
        sum(times.held[stage] for stage in stages) <= limit * (1 + 1e-9)
        for stages, limit in zip(spec.places, limits, strict=True)
    )


def _candidates(timing: Timing, microbatches: int) -> Iterator[Numbers]:
    assert has_room(timing.spec), "no room for a microbatch"
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for order in (*_from_literature(timing, microbatches), *_by_rules(timing)):
        key = tuple(map(tuple, order))
        if key not in seen and all(map(timing.fits, order)):
            seen.add(key)
            yield order


def _by_rules(timing: Timing) -> Iterator[Numbers]:
    rules = product(_EAGER_VALUES, (True, False), _PATIENCE_VALUES)
    affordable = max(2, EFFORT // (_COST_OF_RULE * len(timing.passes)))
    for eager, deepest, patience in islice(rules, affordable):
        order = greedy(timing, Rule(patience, eager, deepest))
        if order is not None:
            yield order


def _from_literature(timing: Timing, microbatches: int) -> Iterator[Numbers]:
    spec, limits = timing.spec, timing.limit
    for order in map(halved, literature(spec, microbatches).values()):
        yield timing.numbers(order)
        undeferred = [[e for e in passes if e.kind is not Kind.BACKWARD_WEIGHT] for passes in order]
        for patience in _PATIENCE_VALUES:
            filled = deferred(spec, undeferred, limits, patience)
            if filled is not None:
                yield timing.numbers(filled)

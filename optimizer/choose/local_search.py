"""Searches by steps from division to division: each faster than the last, or best first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from pipedream.optimizer.choose.division import Division
from pipedream.optimizer.choose.trial import T, Trials

Steps: TypeAlias = Callable[[Division], Iterable[Division]]
"""The divisions that are a step away from one."""

WorthSteps: TypeAlias = Callable[[Division], Iterable[tuple[Division, float]]]
"""The same, each with the relative gain below which it is none."""


def climb(start: T, trials: Trials[T], steps: WorthSteps, most: int) -> T:
    """The best division that steps lead to, each to a faster one, until `most` is spent."""
    best, improved = start, True
    while improved:
        improved = False
        for division, gain in steps(best.division):
            if trials.spent > most:
                return best
            within = best.seconds * (1 - gain)
            trial = trials.tried(division, within)
            if trial is not None and trial.seconds < within:
                best, improved = trial, True
                break
    return best


def best_first(
    starts: Sequence[T],
    trials: Trials[T],
    steps: Steps,
    most: int,
    worth: float,
    unfit: bool = False,
) -> T:
    """The best division found best first: of all that are known and whose steps have not been
    tried, the best is next, be it slower than the best; until `most` is spent.

    Divisions that take at least `worth` times as long as the best one that fits lead nowhere, nor
    do those that do not fit unless `unfit`.
    """
    best = min(starts, key=lambda trial: trial.rank)
    seen = {trial.division for trial in starts}
    waiting = [(trial.rank, number, trial) for number, trial in enumerate(starts)]
    heapify(waiting)
    while waiting:
        for division in steps(heappop(waiting)[-1].division):
            if trials.spent > most:
                return best
            if division in seen:
                continue
            trial = trials.tried(division, best.seconds * worth)
            if trial is not None and (trial.fits or unfit):
                seen.add(division)
                best = min(best, trial, key=lambda each: each.rank)
                heappush(waiting, (trial.rank, len(starts) + len(seen), trial))
    return best

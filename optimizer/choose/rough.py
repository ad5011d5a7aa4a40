"""Rough choices, in seconds: the best of a few candidates, none of them improved."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pipedream.graph.errors import UserError
from pipedream.optimizer.choose.candidates import candidates
from pipedream.optimizer.choose.ordered import even, shapes
from pipedream.optimizer.choose.ordered_trials import OrderedTrial, OrderedTrials
from pipedream.optimizer.choose.placed_trials import PlacedTrials
from pipedream.optimizer.choose.trial import Trial
from pipedream.optimizer.search.planner import check
from pipedream.optimizer.search.request import Request

ORDERS = ("interleaved", "zb-h1", "zb-h2", "zb-v")
"""Orders that may be faster than 1F1B; the others hold less memory and take longer."""

_FIRST = 3
"""Candidates: data parallelism, and what the search under the planner's own cost model finds."""


def rough_choice(request: Request) -> Trial | None:
    """The fastest of the first candidates, in order 1F1B, that fits; None if none does. Raises
    UserError for a request that no plan can meet.
    """
    check(request)
    starts = islice(candidates(request), _FIRST)
    trials = PlacedTrials(request)
    tried = (trials.tried(division) for division in dict.fromkeys(each for _, each in starts))
    fitting = (trial for trial in tried if trial is not None and trial.fits)
    return min(fitting, key=lambda trial: trial.seconds, default=None)


def rough_orders(request: Request, stages: int) -> Iterator[OrderedTrial]:
    """Stages of even time in each shape of the request's order, of pipelines of about as many
    devices as one of `stages`, those that fit.
    """
    order = str(request.order)
    for shape in shapes(request, order):
        if not stages <= 2 * len(shape.ranks) <= 4 * stages:
            continue
        trials = OrderedTrials(request, order, shape)
        try:
            trial = trials.try_out(even(request.planning, shape))
        except UserError:
            continue
        if trial is not None and trial.fits:
            yield trial

"""Rough choices, in seconds: the best of a few candidates, none of them improved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from pipedream.graph.errors import UserError
from pipedream.optimizer.choose.candidates import data_parallel, stages_alike
from pipedream.optimizer.choose.division import Division, in_order
from pipedream.optimizer.choose.ordered import even, shapes
from pipedream.optimizer.choose.ordered_trials import OrderedTrial, OrderedTrials
from pipedream.optimizer.choose.placed_trials import PlacedTrials
from pipedream.optimizer.choose.trial import Trial
from pipedream.optimizer.search.planner import check, rough_plan
from pipedream.optimizer.search.request import Request

ORDERS = ("interleaved", "zb-h1", "zb-h2", "zb-v")
"""Orders that may be faster than 1F1B; the others hold less memory and take longer."""

_CUTS = 80
"""Cuts over which the search is made; the work goes with their square."""


def rough_choice(request: Request) -> Trial | None:
    """The fastest, in order 1F1B, of data parallelism, pipelines whose stages are alike, and what a
    search over few cuts finds where there are not many devices; None if none fits. Raises UserError
    for a request that no plan can meet.
    """
    check(request)
    trials = PlacedTrials(request)
    tried = (trials.tried(division) for division in dict.fromkeys(_starts(request)))
    fitting = (trial for trial in tried if trial is not None and trial.fits)
    return min(fitting, key=lambda trial: trial.seconds, default=None)


def _starts(request: Request) -> Iterator[Division]:
    if not request.rules.straight or request.cluster.devices == 1:
        yield data_parallel(request)
    if not request.rules.straight:
        yield from (division for _, division in stages_alike(request))
    if request.has_many_devices:
        return
    with suppress(UserError):
        division = Division.of(rough_plan(request, _CUTS).plan, request.planning)
        yield division
        yield division._replace(ranks=in_order(division.replicas))


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

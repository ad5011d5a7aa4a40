"""A plan for a model whose parts share parameters, as tied weights are: together, or with a flush.

Stages that share a parameter have to update together. Under a schedule in which each updates when
it comes to it, all that read the parameter are one stage; where the user leaves the schedule open,
one with a flush may be faster than that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan
from pipedream.graph.profile import Sharing
from pipedream.optimizer.choose.chooser import best_plan
from pipedream.optimizer.search.outcome import Outcome
from pipedream.optimizer.search.request import Request
from pipedream.schedule.policy import uniform_updates


class Chosen(NamedTuple):
    """A plan, the request that it is for, and what shared parameters had to do with it in words."""

    request: Request
    outcome: Outcome
    notes: tuple[str, ...] = ()


def plan_shared(request: Request, any_schedule: bool) -> Chosen:
    """The best plan; with `any_schedule` that of a flush, if shared parameters make it faster.

    Raises UserError if no plan fits.
    """
    if not request.sharing or uniform_updates(request.schedule):
        return Chosen(request, best_plan(request))
    flush = replace(request, schedule="flush") if any_schedule else None
    try:
        together = best_plan(request)
    except UserError:
        if flush is None:
            raise
        outcome = best_plan(flush)
        note = (
            f"{_holders(request.sharing)}: {request.schedule} keeps these in one stage, of which"
            " there is no such plan; planned with a flush instead."
        )
        return Chosen(flush, outcome, (note,))
    held = f"{_holders(request.sharing)}: {request.schedule} keeps these in one stage"
    if request.split is not None:
        return Chosen(request, together)
    if flush is None:
        return Chosen(request, together, (f"{held}; --schedule flush may divide them.",))
    apart = best_plan(flush)
    if all(_holds_all(stage.nodes, request.sharing) for stage in apart.plan.stages):
        note = f"{held}, and a flush would not be faster with them apart."
        return Chosen(request, together, (note,))
    one, other = _seconds(together.plan, request), _seconds(apart.plan, flush)
    if other < one:
        note = f"{held}; planned with a flush instead, {one / other:.2f} times as fast."
        return Chosen(flush, apart, (note,))
    note = f"{held}, {other / one:.2f} times as fast as apart, with a flush."
    return Chosen(request, together, (note,))


def _holds_all(nodes: Collection[str], sharing: Sequence[Sharing]) -> bool:
    """Whether a stage of these nodes has all that read a parameter, or none."""
    return all(len({*each.nodes} & {*nodes}) in (0, len(each.nodes)) for each in sharing)


def _holders(sharing: Sequence[Sharing]) -> str:
    name, nodes, _ = sharing[0]
    more = f" and {len(sharing) - 1} more" if len(sharing) > 1 else ""
    return f"Shared: {name}{more}, read by {nodes[0]} and {nodes[-1]}"


def _seconds(plan: Plan, request: Request) -> float:
    """Simulated, per minibatch; in closed form if that takes too long."""
    simulated = plan.predicted.simulated or request.simulate(plan)
    return (
        plan.predicted.seconds_shared_out if simulated is None else simulated.seconds_per_minibatch
    )

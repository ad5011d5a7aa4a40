"""What limits the stages of a plan whose ranks have several of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pipedream.graph.plan import DraftPlan
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.closed_form import ClosedForm
from pipedream.schedule.policy import policy
from pipedream.schedule.spec import PipelineSpec, in_order_of


def limits(plan: DraftPlan, request: Request) -> list[str]:
    """For each stage compute, all-reduce or boundary, as for plans in the order 1F1B.

    It is boundary where messages use the port of a rank for longer than passes and sums of all its
    stages take. A rank may wait for others longer than that: the simulation says how long.
    """
    form = _closed_form(plan, request)
    compute: list[float] = []
    summed: list[float] = []
    whole: dict[tuple[int, ...], float] = defaultdict(float)
    for stage, (work, ranks) in enumerate(zip(form.works, form.ranks, strict=True)):
        size = form.policy.round_size(stage)
        passes = work.forward_seconds + work.backward_seconds + form.busy[stage]
        compute.append(passes / len(ranks) + work.update_seconds / size)
        summed.append(form.exposed[stage] / size)
        whole[tuple(ranks)] += compute[stage] + summed[stage]
    return [
        "boundary"
        if _port_seconds(form, ranks) > whole[tuple(ranks)]
        else "all-reduce"
        if summed[stage] > compute[stage]
        else "compute"
        for stage, ranks in enumerate(form.ranks)
    ]


def _port_seconds(form: ClosedForm, ranks: Sequence[int]) -> float:
    """Seconds per minibatch in which the busiest port of these ranks is in use."""
    own = (
        seconds
        for port, seconds in form.ports.items()
        if port.level == 1 and port.component in ranks
    )
    return max(own, default=0.0)


def _closed_form(plan: DraftPlan, request: Request) -> ClosedForm:
    assert plan.predicted.microbatches is not None
    spec = PipelineSpec(plan.schedule, plan.replicas, plan.links, plan.predicted.microbatches)
    return request.closed_form(plan, policy(in_order_of(plan, spec)))

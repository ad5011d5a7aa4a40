"""Whether the stages of a plan can learn in its order: known when the model is captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.graph.errors import UserError
from pipedream.graph.plan import workers_by_rank
from pipedream.runtime.run.job import Job
from pipedream.runtime.run.training_segment import training_segments, whole_updates
from pipedream.schedule.action import StageLink
from pipedream.schedule.checker import UnsoundError, check_ranks
from pipedream.schedule.schedule import Schedule

_MOST_CHECKED = 1_000
"""Minibatches of an order that is proved sound before a run: they take less than a second."""


def check_stages(
    job: Job, links: Sequence[StageLink], tied: Mapping[str, Sequence[int]], minibatches: int
) -> None:
    """Checks a run whose epochs have so many minibatches, for stages with these `links`.

    `tied`: the stages that hold a parameter, by its name, where there are several. Raises UserError
    where they cannot learn it together, or the ranks would wait for one another.
    """
    _check_tied(job, tied)
    if job.order != DEFAULT_ORDER:
        spec, most = job.spec(links, tied), whole_updates(_MOST_CHECKED, job.policy)
        segments = training_segments(minibatches, job.segment_minibatches)
        for count in {min(len(segment), most) for segment in segments}:
            _check_order(job, Schedule(spec, count))


def _check_tied(job: Job, tied: Mapping[str, Sequence[int]]) -> None:
    teams = job.plan.rank_assignment
    ranks = [[rank for team in stage for rank in team.ranks] for stage in teams]
    for name, stages in tied.items():
        problem = job.policy.unshared(name, stages, ranks)
        if problem is not None:
            raise UserError(problem)


def _check_order(job: Job, schedule: Schedule) -> None:
    workers = workers_by_rank(job.plan.rank_assignment)
    try:
        actions = {rank: schedule.actions(*own) for rank, own in workers.items()}
        check_ranks(schedule, actions, job.plan.rank_assignment)
    except (UnsoundError, AssertionError) as error:
        problem = (str(error) or "it does not fit").splitlines()[0]
        raise UserError(
            f"order {job.order} of the plan, for {schedule.minibatches} minibatches: {problem}"
        ) from error

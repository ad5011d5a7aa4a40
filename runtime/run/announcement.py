"""What a run says that it is about to do, before it trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.runtime.optim.advice import advice
from pipedream.runtime.run.job import Job
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.steady_state import SteadySpan


def announced(job: Job, minibatches: int, learners: str | None) -> Iterator[tuple[str, str]]:
    """Yields titles and lines of a run whose epochs have so many minibatches. `learners`: which
    optimizer learns what, if there are several.
    """
    late = _late_updates(job, minibatches)
    yield "training", _of_updates(job, minibatches, late)
    if learners is not None:
        yield "optimizer", learners
    advised = None if _is_divided(job) else advice(job.config, job.schedule, max(late))
    if advised is not None:
        yield "advice", advised


def _is_divided(job: Job) -> bool:
    """Returns whether ranks have parts of parameters or of what the optimizer remembers."""
    stages = job.plan.stages
    return any(each.mesh is not None or job.divides_updates(each.stage) for each in stages)


def _of_updates(job: Job, minibatches: int, late: Sequence[int]) -> str:
    """Returns a line on updates, the examples of each, and how late gradients are."""
    policy, config = job.policy, job.config
    stages = range(len(job.plan.replicas))
    sizes = [policy.round_size(stage) for stage in stages]
    sizes = sizes[:1] if len(set(sizes)) == 1 else sizes
    updates = ", ".join(str(-(-minibatches // size)) for size in sizes)
    examples = ", ".join(str(size * config.batch_size) for size in sizes)
    counts = f"{updates} updates an epoch, each of {examples} examples"
    lateness = "no gradient is late"
    if any(late):
        lateness = f"gradients are up to {', '.join(map(str, late))} updates late"
        lateness += " (stage by stage)" * (len(late) > 1)
    clipped = ""
    if config.clip_norm is not None:
        of = "the whole model" if policy.uniform_updates else "each stage by itself"
        clipped = f"; clip_norm is of {of}"
    order = "" if job.order == DEFAULT_ORDER else f" in order {job.order}"
    return f"{job.schedule}{order}: {counts}; {lateness}{clipped}"


def _late_updates(job: Job, minibatches: int) -> list[int]:
    """Returns by how many updates the gradients of each stage are late at most."""
    enough = SteadySpan.for_simulation(job.policy).minibatches
    schedule = Schedule(job.spec(), min(minibatches, enough))
    stages = range(len(job.plan.replicas))
    return [max(schedule.delays(stage).values(), default=0) for stage in stages]

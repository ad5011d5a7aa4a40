"""What a run is about to do, said before it trains: updates, examples of each, late gradients."""

from __future__ import annotations

from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.runtime.run.job import Job
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.steady_state import SteadySpan


def announcement(job: Job, minibatches: int) -> str:
    """Returns one line for a run whose epochs have so many minibatches."""
    policy, config = job.policy, job.config
    sizes = [policy.round_size(stage) for stage in range(len(job.plan.replicas))]
    sizes = sizes[:1] if len(set(sizes)) == 1 else sizes
    updates = ", ".join(str(-(-minibatches // size)) for size in sizes)
    examples = ", ".join(str(size * config.batch_size) for size in sizes)
    counts = f"{updates} updates an epoch, each of {examples} examples"
    late = _latest(job, minibatches)
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


def _latest(job: Job, minibatches: int) -> list[int]:
    """Returns by stage how many updates at most lie between a gradient and its use."""
    enough = SteadySpan.for_simulation(job.policy).minibatches
    schedule = Schedule(job.spec(), min(minibatches, enough))
    stages = range(len(job.plan.replicas))
    return [max(schedule.delays(stage).values(), default=0) for stage in stages]

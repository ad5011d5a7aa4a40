"""How many minibatches a plan needs in flight to keep the pace it promises."""

from __future__ import annotations

from math import lcm

from pipedream.graph.plan import DraftPlan
from pipedream.optimizer.cost.network import Network
from pipedream.optimizer.simulate.workload import StageWork, Workload
from pipedream.schedule.in_flight import StageTimes, useful_in_flight
from pipedream.schedule.policy import Policy

_LEEWAY = 1.05
"""Tolerated slowdown: between workers with equal work, a message of almost nothing would otherwise
cost every stage one more minibatch in flight."""

_MOST_PAIRS = 64
"""Pairs of replicas examined for each link."""


def required_in_flight(plan: DraftPlan, workload: Workload, policy: Policy) -> tuple[int, ...]:
    """The minibatches in flight of each stage.

    Assumes the times of `workload`, an idle network for every message and all-reduce, and a
    minibatch about as often as the cost model predicts or the workers can.
    """
    works = [
        work.at(min(plan.cluster.device(rank).speed for rank in stage.ranks))
        for work, stage in zip(workload.stages, plan.stages, strict=True)
    ]
    update = [_update(plan, policy, stage, work) for stage, work in enumerate(works)]
    busy = [
        (work.forward_seconds + work.backward_seconds + seconds) / replicas
        for work, seconds, replicas in zip(works, update, plan.replicas, strict=True)
    ]
    pace = StageTimes(
        period=_LEEWAY * max(plan.predicted.seconds_per_minibatch, *busy),
        forward=[work.forward_seconds for work in works],
        backward=[work.backward_seconds for work in works],
        update=update,
        there={link: _message(plan, link, sent) for link, sent in workload.forward_bytes.items()},
        back={link: _message(plan, link, sent) for link, sent in workload.backward_bytes.items()},
    )
    return useful_in_flight(plan.replicas, pace, list(workload.forward_bytes), policy.synchronized)


def _update(plan: DraftPlan, policy: Policy, stage: int, work: StageWork) -> float:
    """Seconds of all-reduce and update per minibatch of a worker."""
    ranks = plan.stages[stage].ranks
    reducing = Network(plan.cluster).all_reduce(ranks, work.parameter_bytes).total
    return (reducing + work.update_seconds) * len(ranks) / policy.round_size(stage)


def _message(plan: DraftPlan, link: tuple[int, int], amount: float) -> float:
    """Seconds of the slowest message of `amount` bytes on the link."""
    sources, targets = (plan.stages[stage].ranks for stage in link)
    count = min(lcm(len(sources), len(targets)), _MOST_PAIRS)
    pairs = {(sources[b % len(sources)], targets[b % len(targets)]) for b in range(count)}
    return max(Network(plan.cluster).message(*pair, amount).total for pair in pairs)

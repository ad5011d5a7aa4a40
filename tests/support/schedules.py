"""Schedules and policies by their few numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipedream.graph.choices import ScheduleName
from pipedream.graph.plan import RankAssignment, WorkerGroup
from pipedream.schedule import policy as policies
from pipedream.schedule.action import StageLink
from pipedream.schedule.orders.literature import loop, vee
from pipedream.schedule.policy import Policy
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PipelineSpec

ORDERS = {
    "interleaved": (loop, 2),
    "zb-h1": (loop, 1),
    "zb-h2": (loop, 1),
    "zb-v": (vee, 2),
    "v-half": (vee, 2),
    "v-min": (vee, 2),
    "auto": (vee, 2),
}
"""Each with how its stages are on the ranks, and how many are on each."""


def schedule(
    name: ScheduleName,
    replicas: Sequence[int],
    links: Iterable[StageLink],
    minibatches: int,
    microbatches: int = 1,
    tied: Sequence[int] = (),
    accumulate: int = 1,
    max_in_flight: Sequence[int] | None = None,
    joint_norm: bool = False,
) -> Schedule:
    most = None if max_in_flight is None else tuple(max_in_flight)
    ordered = tuple(sorted(set(links)))
    spec = PipelineSpec(
        name,
        tuple(replicas),
        ordered,
        microbatches,
        accumulate,
        most,
        tuple(tied),
        joint_norm=joint_norm,
    )
    return Schedule(spec, minibatches)


def assigned(ranks: Sequence[Sequence[int]]) -> RankAssignment:
    """`ranks[stage][replica]` is the rank of each worker."""
    return [[WorkerGroup((rank,)) for rank in of_stage] for of_stage in ranks]


def policy(
    name: ScheduleName,
    replicas: Sequence[int],
    microbatches: int = 1,
    accumulate: int = 1,
    max_in_flight: Sequence[int] | None = None,
) -> Policy:
    most = None if max_in_flight is None else tuple(max_in_flight)
    return policies.policy(PipelineSpec(name, tuple(replicas), (), microbatches, accumulate, most))

"""A lower bound on what the simulator says of any division: the certificate of a choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Self

import numpy as np

from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.graph.cluster import Cluster, Link, ring_seconds
from pipedream.optimizer.cost.models import LargestTerm, LevelLinks, Terms, Work
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.cuts.planning_graph import Ints
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request
from pipedream.schedule.policy import uniform_updates

_MOST_CUTS = 300
"""With more, the bound is one over bins of cuts."""


@dataclass(frozen=True)
class RelaxedCost(LargestTerm):
    """What a stage takes at least on any m devices of a cluster: max(C'/m, R/N).

    R: a ring all-reduce over the links that m devices cannot do without, all of it hidden behind
    the passes; N: minibatches of a round, m or a fixed number. Nothing need be sent between stages.

    `rings`: the most devices that do without a link, and the link.
    """

    rings: tuple[tuple[int, Link], ...]
    minibatches: int | None = None
    name: str = "network"
    counts_overheads: ClassVar[bool] = True

    @staticmethod
    def of(cluster: Cluster) -> RelaxedCost:
        levels = range(1, len(cluster.machines) + 1)
        return RelaxedCost(
            tuple((prod(cluster.machines[: k - 1]), cluster.ring_link(k)) for k in levels)
        )

    def in_rounds(self, minibatches: int | None) -> Self:
        return replace(self, minibatches=minibatches)

    def terms(self, work: Work, level: LevelLinks, replicas: Ints, first: bool) -> Terms:
        reduced = np.zeros(np.broadcast_shapes(np.shape(replicas), work.parameter_bytes.shape))
        for without, ring in self.rings:
            taken = ring_seconds(ring, work.parameter_bytes, replicas)
            reduced = np.maximum(reduced, np.where(replicas > without, taken, 0.0))
        rounds = replicas if self.minibatches is None else self.minibatches
        return Terms(work.inner_seconds / replicas, reduced / rounds, np.zeros(1))


def lower_bound(request: Request) -> float:
    """Seconds per minibatch that no plan chosen by simulation takes less than, on however many of
    the devices: a certificate for any division in the order of the request.
    """
    cluster, settings = request.cluster, request.settings
    if request.order not in (None, DEFAULT_ORDER) or request.has_many_devices:
        # No order takes less than all work, shared out evenly.
        speeds = sum(cluster.device(rank).speed for rank in range(cluster.devices))
        return float(request.planning.compute_seconds.sum()) / speeds
    # Of the others, what the best division takes whose stages cost no more than in any plan.
    in_rounds = uniform_updates(settings.schedule)
    microbatches = settings.microbatches
    if settings.schedule == "2bw":  # at most so many: see Policy.least_microbatches
        microbatches = max(microbatches, 2 * cluster.devices)
    inner = prod(cluster.machines[:-1])
    flat = Cluster(
        machines=(cluster.devices,),
        bandwidth=(max(cluster.bandwidth),),
        kinds=cluster.kinds,
        machine_kinds=tuple(kind for kind in cluster.machine_kinds for _ in range(inner)),
    )
    update_rate = request.update_rate
    if request.zero != "never" and request.constrains_stages(request.device_types):
        update_rate *= cluster.devices  # each may update a part of the parameters
    relaxed = replace(
        request,
        update_rate=update_rate,
        cluster=flat,
        model=RelaxedCost.of(cluster),
        memory=None,
        recompute="never",
        zero="never",
        latency=None,
        schedule="flush" if in_rounds else "weight-stashing",
        microbatches=microbatches if in_rounds else None,
        weight_prediction=False,
        rules=Rules(request.rules.straight, fewer_machines=True),
        in_flight="least",
    )
    return optimize(relaxed, _MOST_CUTS).plan.predicted.lower_bound_seconds

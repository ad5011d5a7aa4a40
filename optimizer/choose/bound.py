"""A lower bound on what the simulator says of any division: the certificate of a choice."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Self

import numpy as np

from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.graph.cluster import Cluster, Link, ring_seconds
from pipedream.graph.profile import TrainingOverheads
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
    cluster = request.cluster
    if request.order not in (None, DEFAULT_ORDER) or request.has_many_devices:
        # No order takes less than all work, shared out evenly.
        return shared_out(request)
    # Of the others, what the best division takes whose stages cost no more than in any plan.
    microbatches = _most_microbatches(request)
    inner = prod(cluster.machines[:-1])
    flat = Cluster(
        machines=(cluster.devices,),
        bandwidth=(max(cluster.bandwidth),),
        kinds=cluster.kinds,
        machine_kinds=tuple(kind for kind in cluster.machine_kinds for _ in range(inner)),
    )
    step_rate = request.step_rate
    if request.zero != "never" and request.constrains_stages(request.device_types):
        step_rate *= cluster.devices  # each may update a part of the parameters
    relaxed = replace(
        request,
        update_rate=step_rate,
        in_place_rate=None,
        overheads=_with_least_sums(request, microbatches),
        cluster=flat,
        model=RelaxedCost.of(cluster),
        memory=None,
        recompute="never",
        zero="never",
        latency=None,
        schedule="weight-stashing" if microbatches is None else "flush",
        microbatches=microbatches,
        corrections=frozenset(),
        rules=Rules(request.rules.straight, fewer_machines=True),
        in_flight="least",
    )
    return optimize(relaxed, _MOST_CUTS).plan.predicted.lower_bound_seconds


def shared_out(request: Request, passes: float | None = None) -> float:
    """Seconds per minibatch of all work, shared out evenly among the devices; `passes`: what those
    of all nodes take on one [default: as in the graph].
    """
    cluster = request.cluster
    speeds = sum(cluster.device(rank).speed for rank in range(cluster.devices))
    if passes is None:
        passes = float(request.planning.compute_seconds.sum())
    return (passes + _least_overhead(request)) / speeds


def _least_overhead(request: Request) -> float:
    """Seconds of a minibatch's calls, reading, sums of gradients and updates that all devices
    together take at least, however they share the model: it is called and read for once, each part
    of a parameter is updated by one of them, and a worker of all that are replicas has fewest
    minibatches to add up.
    """
    overheads, most = request.overheads, _most_microbatches(request)
    parameters = float(request.planning.parameter_bytes.sum())
    updated = sum(node.updated_bytes for node in request.graph.nodes.values())
    updates = updated / request.step_rate / (most or request.cluster.devices)
    if overheads is None:
        return updates
    calls = overheads.call_forward + overheads.call_backward + overheads.reading
    return calls + updates + parameters * _least_sum_seconds(request)


def _most_microbatches(request: Request) -> int | None:
    """Of a round; None if each stage makes an update for as many minibatches as it has replicas."""
    settings = request.settings
    if not uniform_updates(settings.schedule):
        return None
    if settings.schedule == "2bw":  # at most so many: see Policy.least_microbatches
        return max(settings.microbatches, 2 * request.cluster.devices)
    return settings.microbatches


def _least_sum_seconds(request: Request) -> float:
    """Seconds per byte of parameters of the sums of a minibatch, on devices that are replicas."""
    if request.overheads is None or not uniform_updates(request.schedule):
        return 0.0
    return request.overheads.sum_seconds(request.settings.microbatches / request.cluster.devices)


def _with_least_sums(request: Request, minibatches: int | None) -> TrainingOverheads | None:
    """The overheads with these sums on a worker that has so many minibatches of a round."""
    least = _least_sum_seconds(request)
    if request.overheads is None or not least:
        return request.overheads and replace(request.overheads, gradient_sum_rate=math.inf)
    rate = (1 - 1 / (minibatches or 1)) / least
    return replace(request.overheads, gradient_sum_rate=rate)

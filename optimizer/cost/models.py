"""Cost models by name: how long a stage takes on its replicas (symbols: see each).

All are closed forms in the time of the stage on one component of the level below. The search and
its lower bounds rely on three properties of each:

- the seconds never decrease as any of `inner_seconds`, `parameter_bytes`, `bytes_in` or `bytes_out`
  grows: what is costliest inside is costliest outside, and a part of a stage, without its
  boundaries, costs no more than the whole;
- on m components they are at least an m-th of `inner_seconds`: devices share work at best equally;
- they grow by at most an m-th of the growth of `inner_seconds`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

import numpy as np

from pipedream.graph.cluster import Link, ring_seconds
from pipedream.optimizer.cuts.planning_graph import Floats, Ints
from pipedream.schedule.overlap import BUCKET_BYTES

_BACKWARD = 2 / 3
"""The backward pass as a share of both, for layers whose two gradients take as long as they."""


@dataclass(frozen=True)
class LevelLinks:
    """The links of one level of the cluster.

    `bandwidth`: bytes per second between its components; `inner_machines`: components of the next
    inner level in each (1 at the innermost), and `inner_devices`; `link`: for a message between two
    components; `ring`: for one step of an all-reduce.
    """

    bandwidth: float
    inner_machines: int
    inner_devices: int
    link: Link
    ring: Link


@dataclass(frozen=True)
class Work:
    """Stages that begin at one cut; arrays have one column per end.

    `inner_seconds[case, end]`: the best time on one component (C'), one row per replica count;
    `parameter_bytes`: W; `bytes_in` and `bytes_out`: what crosses the cuts before and after (a_in,
    a_out).
    """

    inner_seconds: Floats
    parameter_bytes: Floats
    bytes_in: float
    bytes_out: Floats


@dataclass(frozen=True)
class Terms:
    """Seconds per minibatch by cause; arrays that broadcast against each other."""

    compute: Floats
    all_reduce: Floats
    boundary: Floats


class CostModel(Protocol):
    """The cost of stages on `replicas` components of a level, `first` of their pipeline or not."""

    @property
    def name(self) -> str:
        """The name in --cost-model."""

    @property
    def counts_overheads(self) -> bool:
        """Whether measured overheads of training count: updates, calls, reading, spread."""

    @property
    def prices_plans(self) -> bool:
        """Whether a plan costs what `ClosedForm` says, and not its costliest stage by `terms`,
        which then are an estimate that guides the search.
        """

    def in_rounds(self, minibatches: int | None) -> CostModel:
        """The model of a schedule that updates once per so many minibatches; None if once per
        minibatch of each replica.
        """

    def terms(self, work: Work, level: LevelLinks, replicas: Ints, first: bool) -> Terms: ...

    def seconds(self, terms: Terms) -> Floats:
        """Seconds per minibatch of all terms together."""

    def limit(self, terms: Terms) -> str:
        """The term that sets the time of a single stage: compute, all-reduce or boundary."""


class LargestTerm:
    """Part of a cost model: all-reduce and messages overlap with all else."""

    counts_overheads: ClassVar[bool] = False
    prices_plans: ClassVar[bool] = False

    def in_rounds(self, minibatches: int | None) -> Self:
        """The same: what a round is makes no difference."""
        return self

    def seconds(self, terms: Terms) -> Floats:
        return np.maximum(np.maximum(terms.compute, terms.all_reduce), terms.boundary)

    def limit(self, terms: Terms) -> str:
        return _largest(compute=terms.compute, all_reduce=terms.all_reduce, boundary=terms.boundary)


class AllReduceAdded(LargestTerm):
    """Part of a cost model: messages overlap with all else, and the all-reduce is added."""

    def seconds(self, terms: Terms) -> Floats:
        return np.maximum(terms.compute + terms.all_reduce, terms.boundary)

    def limit(self, terms: Terms) -> str:
        if terms.boundary.item() > (terms.compute + terms.all_reduce).item():
            return "boundary"
        return _largest(compute=terms.compute, all_reduce=terms.all_reduce)


@dataclass(frozen=True)
class PaperCost(LargestTerm):
    """PipeDream, SOSP 2019, section 3.1.

    Stage: max(C', 2(m-1)W/B)/m. Boundary before every stage but the first of its pipeline: 2a/B,
    divided by the activation compression ratio if there is one. The recurrence
    A(j, m) = min max(A(i, m - m'), 2a_i/B, T(i+1 -> j, m')) hands out all m machines, and T is the
    time of the level below on all of its machines: every machine is used, unless the planner may
    use fewer.
    """

    compression: float | None = None
    name: str = "paper"

    def terms(self, work: Work, level: LevelLinks, replicas: Ints, first: bool) -> Terms:
        reduced = 2 * (replicas - 1) * work.parameter_bytes / level.bandwidth
        sent = 0.0 if first else 2 * work.bytes_in / level.bandwidth / (self.compression or 1.0)
        return Terms(
            compute=work.inner_seconds / replicas,
            all_reduce=reduced / replicas,
            boundary=np.array([sent]),
        )


@dataclass(frozen=True)
class ReleasedCost(AllReduceAdded):
    """What PipeDream's released optimizer means to compute.

    The first stage of a pipeline: (C' + 4(m-1)W/(B m)/q)/m, with q the machines of the next inner
    level. Every later stage: max of (C' + 4(m-1)W/(B m))/m, 2 a_in/(B m) and 2 a_out/(B m); the
    boundary terms are divided by the activation compression ratio, and absent without one.
    """

    compression: float | None = None
    name: str = "released"

    def terms(self, work: Work, level: LevelLinks, replicas: Ints, first: bool) -> Terms:
        reduced = 4 * (replicas - 1) * work.parameter_bytes / (level.bandwidth * replicas)
        compute = work.inner_seconds / replicas
        if first:
            return Terms(compute, reduced / level.inner_machines / replicas, np.zeros(1))
        if self.compression is None:
            return Terms(compute, reduced / replicas, np.zeros(1))
        crossing = np.maximum(work.bytes_in, work.bytes_out)
        sent = 2 * crossing / (level.bandwidth * replicas) / self.compression
        return Terms(compute, reduced / replicas, sent)


@dataclass(frozen=True)
class MeasuredCost(AllReduceAdded):
    """Latency plus bytes over bandwidth, or links as measured, and what the runtime overlaps.

    Stage: (C' + ring(W, m))/m. C' includes measured updates, calls and reading. ring(W, m) =
    2(m-1) step(W/m) is an all-reduce over m components, once per m minibatches. It is added in
    full, an upper bound: the engine begins it in the last backward pass of a round
    (comm/buckets.py), and how much that hides is not modelled. gloo adds up and copies on the
    worker's own processor, 75 to 88 % of the time of a sum of 0.3 to 64 MB on two processes of one
    core each; with NCCL, or spare cores, that backward pass may hide all of it.

    Boundary: (send(a_in) + send(a_out))/m, while the engine computes. The m components take turns,
    and each link carries both directions at once, gradients of what came in and activations that
    go out. What crosses an outer level passes through the links within as well. The share of a
    link's time in which it keeps the ranks at its ends `busy` is added to C', in both directions.

    A component is assumed to add up all its weights for every minibatch, though replicas inside it
    share these, so with replication at several levels the time is an upper bound. Waiting for a
    first or a late message is left to the simulator.
    """

    compression: float | None = None
    name: str = "measured"
    counts_overheads: ClassVar[bool] = True

    def terms(self, work: Work, level: LevelLinks, replicas: Ints, first: bool) -> Terms:
        reduced = ring_seconds(level.ring, work.parameter_bytes, replicas)
        ratio = self.compression or 1.0
        into, out = (level.link.seconds(size / ratio) for size in (work.bytes_in, work.bytes_out))
        taken = 2 * level.link.busy * (into + out)
        return Terms(
            (work.inner_seconds + taken) / replicas, reduced / replicas, (into + out) / replicas
        )


@dataclass(frozen=True)
class NetworkCost(AllReduceAdded):
    """What the simulator says, as far as a stage by itself can know it.

    Stage: (C' + E)/m, where a ring all-reduce takes R = 2(m-1) step(W/m) once per round, the
    replicas inside a component take part in it, and E of it comes after the backward pass: what
    that does not hide, all that keeps the ranks busy, and at least the last bucket
    (comm/buckets.py). A round is a minibatch on each replica, or a fixed number of minibatches:
    then it is C'/m + E over their number.

    Boundary: (send(a_in) + send(a_out))/m, as activations of one and gradients of the other leave
    through the same port. What crosses an outer level passes through the links within as well.
    """

    minibatches: int | None = None
    name: str = "network"
    counts_overheads: ClassVar[bool] = True
    prices_plans: ClassVar[bool] = True

    def in_rounds(self, minibatches: int | None) -> Self:
        return replace(self, minibatches=minibatches)

    def terms(self, work: Work, level: LevelLinks, replicas: Ints, first: bool) -> Terms:
        reduced = ring_seconds(level.ring, work.parameter_bytes, replicas)
        rounds = replicas * level.inner_devices if self.minibatches is None else self.minibatches
        compute = work.inner_seconds / replicas
        passes = compute if self.minibatches is None else work.inner_seconds / rounds
        reduced, last = reduced / rounds, BUCKET_BYTES / np.maximum(work.parameter_bytes, 1.0)
        beside = np.minimum(reduced, _BACKWARD * passes)
        hidden = (1 - level.ring.busy) * beside
        exposed = np.maximum(reduced * np.minimum(1.0, last), reduced - hidden)
        into, out = (level.link.seconds(size) for size in (work.bytes_in, work.bytes_out))
        taken = 2 * level.link.busy * (into + out)
        return Terms(compute + taken / replicas, exposed, (into + out) / replicas)


def _network(_: float | None = None) -> NetworkCost:
    """pd-train sends activations as they are; pd-optimize refuses the option."""
    return NetworkCost()


COST_MODELS: dict[str, Callable[[float | None], CostModel]] = {
    "network": _network,
    "paper": PaperCost,
    "released": ReleasedCost,
    "measured": MeasuredCost,
}
"""By the name in --cost-model; each is called with --activation-compression, None if not given."""

DEFAULT_COST_MODEL = "network"


def _largest(**terms: Floats) -> str:
    return max(terms, key=lambda name: terms[name].item()).replace("_", "-")

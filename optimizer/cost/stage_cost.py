"""The one cost question: how long does this piece of the model take on these devices?

A search asks a `StageCost` and does not depend on which class answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipedream.graph.choices import Recompute, Zero
from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost.device_types import WorstDevice
from pipedream.optimizer.cost.memory import ALONE, MemoryModel, Replicas
from pipedream.optimizer.cost.models import CostModel, LevelLinks, Terms, Work
from pipedream.optimizer.cost.recomputation import Offloaded, Recomputed, compute_seconds
from pipedream.optimizer.cuts.downsets import Cuts, States
from pipedream.optimizer.cuts.planning_graph import Floats, Ints
from pipedream.schedule.policy import Peak

Bools: TypeAlias = NDArray[np.bool_]


class LevelShare(NamedTuple):
    """Stages at one level (1 innermost): from cut `start` to each of `ends`, on `replicas[case, 0]`
    components of the level below; `first`: they begin the pipeline of the level.
    """

    level: int
    start: int
    ends: States
    replicas: Ints
    first: bool


class StageCost(Protocol):
    """Costs of the stages from cut `start` to each of `ends`; infinite if not allowed.

    `downstream_workers` is the number of workers of later stages per worker of this one, rounded
    up. It determines how many minibatches the stage has in flight. `replicas` is the number of
    those of the stage on all levels, where the cost on a device depends on it.
    """

    depends_on_downstream: bool
    depends_on_replicas: bool

    def on(self, device: WorstDevice) -> StageCost:
        """The same question for stages whose worst device is `device`."""

    def on_device(
        self, start: int, ends: States, downstream_workers: int, replicas: int = 1
    ) -> Floats:
        """[end]: the cost on one device."""

    def price(self, inner: Floats, shares: Iterable[LevelShare]) -> Floats:
        """[case, end]: the cost once the stages are spread over these levels, innermost first,
        given the cost on one component below the first of them, `inner[case, end]`.
        """

    def overhead(self, start: int, ends: States, level: int, replicas: Ints) -> Floats:
        """[case, end]: the cost of a level with nothing to compute and nothing to send over a
        boundary; never less for a stage than for a part of it.
        """


@dataclass(frozen=True)
class MemoryLimit:
    """The `bytes` of each device, the memory model of stages, and the recomputation allowed.

    `recompute`: never; in stages that would not fit otherwise (auto, whole); always in all stages
    but the last, whose backward pass follows its forward pass at once (except with gpipe). `zero`:
    whether replicas divide the optimizer's state among them, likewise; that costs less than
    recomputation, and comes before it. `selective`: single nodes may be recomputed, where that is
    enough. `host_bandwidth`: bytes per second to the host and back, where activations may be moved
    there. `speed` of the devices.
    """

    bytes: float
    memory: MemoryModel
    recompute: Recompute = "never"
    zero: Zero = "never"
    selective: bool = False
    host_bandwidth: float | None = None
    speed: float = 1.0

    def on(self, device: WorstDevice) -> MemoryLimit:
        """The limit with the memory of this device."""
        return replace(self, bytes=device.memory, speed=device.speed)

    def fits(
        self, start: int, ends: States, peak: Peak, recompute: bool, of: Replicas = ALONE
    ) -> Bools:
        return self.memory.total(start, ends, peak, recompute, of) <= self.bytes

    def replicas(self, start: int, ends: States, peak: Peak, last: bool, count: int) -> Replicas:
        """For each stage of so many replicas, among how many the optimizer's state is divided."""
        whole = Replicas(count)
        if count == 1 or self.zero == "never":
            return whole
        if self.zero == "always":
            return Replicas(count, count)
        fits = self.fits(start, ends, peak, self.recompute == "always" and not last, whole)
        return Replicas(count, np.where(fits, 1, count))

    def choose(
        self, start: int, ends: States, peak: Peak, last: bool, of: Replicas = ALONE
    ) -> tuple[Bools, Floats]:
        """For each stage whether it fits at all, and the seconds of a minibatch that it recomputes,
        or waits for the host.

        `last`: the stages end the pipeline. `of`: as by `replicas`.
        """
        allowed = not last and self.recompute != "never"
        forward = self.memory.cuts.forward_seconds
        again = np.asarray(forward[ends] - forward[start])
        if allowed and self.recompute == "always":
            return self.fits(start, ends, peak, True, of), again
        fits = self.fits(start, ends, peak, False, of)
        cost = np.full_like(again, np.inf)
        if allowed and not fits.all():
            cost = np.where(self.fits(start, ends, peak, True, of), again, np.inf)
        if self._by_node and not fits.all():
            for number, seconds in reversed(list(enumerate(self.memory.classes.seconds))):
                needed = self.memory.without_classes(start, ends, peak, number, of)
                some = np.minimum(seconds[ends] - seconds[start], again)
                cost = np.minimum(cost, np.where(needed <= self.bytes, some, np.inf))
        if self._by_node and self.host_bandwidth is not None and not fits.all():
            enough = self.memory.offloaded(start, ends, peak, of) <= self.bytes
            copies = self.memory.copy_seconds(start, ends, self.host_bandwidth) * self.speed
            compute = self.memory.compute_seconds
            waiting = np.maximum(copies - (compute[ends] - compute[start]), 0.0)
            cost = np.minimum(cost, np.where(enough, waiting, np.inf))
        cost[fits] = 0.0
        fits = np.isfinite(cost)
        return fits, np.where(fits, cost, 0.0)

    def chosen(
        self, start: int, end: int, peak: Peak, last: bool, of: Replicas = ALONE
    ) -> Recomputed:
        """What a stage recomputes or moves to the host: the fastest that is enough. Where nothing
        is enough, what needs least. `of` as in `choose`.
        """
        ends = slice(end, end + 1)
        allowed = not last and self.recompute != "never"
        if allowed and self.recompute == "always":
            return True
        if self.fits(start, ends, peak, False, of)[0]:
            return False
        if not self._by_node:
            return allowed

        def bytes_of(choice: Recomputed) -> float:
            return self.memory.of(start, end, peak, choice, of).total

        nodes, inside = self.memory.classes.nodes, self.memory.cuts.nodes(start, end)
        fastest = nodes.choose(inside, lambda some: bytes_of(some) <= self.bytes)
        some = (nodes.closed(own, inside) for own in nodes.classes)
        choices: list[Recomputed] = [allowed, *(some if fastest is None else [fastest])]
        if self.host_bandwidth is not None:
            copies = self.memory.copy_seconds(start, ends, self.host_bandwidth)[0]
            choices.append(Offloaded(float(copies) * self.speed))
        enough = [choice for choice in choices if bytes_of(choice) <= self.bytes]
        if enough:
            graph = self.memory.cuts.graph
            return min(enough, key=lambda choice: compute_seconds(graph, inside, choice))
        return min(choices, key=bytes_of)

    @property
    def _by_node(self) -> bool:
        return self.selective and self.recompute == "auto"


class Priced(ABC):
    """Seconds per minibatch under `model`; subclasses know the size and the cuts of the stages.

    `bytes_across[state]` crosses the state's cut.
    """

    depends_on_downstream = depends_on_replicas = False

    def __init__(self, cluster: Cluster, model: CostModel, bytes_across: Floats) -> None:
        self.model = model
        self.levels = levels(cluster)
        self.bytes_across = bytes_across
        self.speed = 1.0

    @abstractmethod
    def parameter_bytes(self, start: int, ends: States) -> Floats:
        """[end]: parameter bytes of the stages."""

    def on(self, device: WorstDevice) -> Self:
        moved = copy(self)
        moved.speed = device.speed
        return moved

    def price(self, inner: Floats, shares: Iterable[LevelShare]) -> Floats:
        for terms in self.terms(inner, shares):
            inner = self.model.seconds(terms)
        return inner

    def terms(self, inner: Floats, shares: Iterable[LevelShare]) -> Iterator[Terms]:
        """The parts of the cost at each level.

        C_k = f(C_(k-1), W, a_in, a_out, m_k, first_k) for k = 1, 2, ..., where C_0 is the cost on a
        device and f the cost model's closed form (PipeDream, SOSP 2019, section 3.1).
        """
        across = self.bytes_across
        for level, start, ends, replicas, first in shares:
            parameters = self.parameter_bytes(start, ends)
            work = Work(inner, parameters, float(across[start]), across[ends])
            terms = self.model.terms(work, self.levels[level - 1], replicas, first)
            inner = self.model.seconds(terms)
            yield terms

    def overhead(self, start: int, ends: States, level: int, replicas: Ints) -> Floats:
        parameters = self.parameter_bytes(start, ends)
        idle = np.zeros_like(parameters)
        work, links = Work(idle[None], parameters, 0.0, idle), self.levels[level - 1]
        terms = (self.model.terms(work, links, replicas, first) for first in (True, False))
        return np.minimum(*map(self.model.seconds, terms))


class Replication(Priced):
    """PipeDream's answer: each component of a stage does the same work on other minibatches.

    With `working` a stage without any work is not allowed.
    """

    def __init__(
        self,
        cuts: Cuts,
        cluster: Cluster,
        model: CostModel,
        limit: MemoryLimit | None = None,
        working: bool = False,
    ) -> None:
        super().__init__(cluster, model, cuts.bytes_across)
        self.cuts = cuts
        self.limit = limit
        self.working = working
        self.depends_on_downstream = limit is not None
        self.depends_on_replicas = limit is not None

    def on(self, device: WorstDevice) -> Self:
        moved = super().on(device)
        moved.limit = self.limit and self.limit.on(device)
        return moved

    def parameter_bytes(self, start: int, ends: States) -> Floats:
        parameters: Floats = self.cuts.parameter_bytes[ends] - self.cuts.parameter_bytes[start]
        return parameters

    def on_device(
        self, start: int, ends: States, downstream_workers: int, replicas: int = 1
    ) -> Floats:
        seconds: Floats = np.maximum(self.cuts.seconds[ends] - self.cuts.seconds[start], 0.0)
        if self.working:
            seconds[self.cuts.working[ends] == self.cuts.working[start]] = np.inf
        if self.limit is not None:
            peak = self.limit.memory.settings.peak(downstream_workers)
            last = not downstream_workers
            of = self.limit.replicas(start, ends, peak, last, replicas)
            fits, again = self.limit.choose(start, ends, peak, last, of)
            seconds = seconds + again
            seconds[~fits] = np.inf
        return (seconds + self.cuts.stage_overhead(start)[ends]) / self.speed


class LeastMemory:
    """Bytes on the fullest worker instead of seconds, to find the plan that needs least memory.

    `zero`: replicas divide the optimizer's state; `selective`: single nodes may be recomputed;
    `offload`: activations moved to the host. Where devices differ, bytes are scaled as if every
    device had `reference` of them.
    """

    depends_on_downstream = depends_on_replicas = True

    def __init__(
        self,
        memory: MemoryModel,
        recompute: bool,
        reference: float = 1.0,
        zero: bool = False,
        selective: bool = False,
        offload: bool = False,
    ) -> None:
        self.memory = memory
        self.recompute, self.zero = recompute, zero
        self.selective, self.offload = selective, offload
        self.reference = reference
        self.device_bytes = reference

    def on(self, device: WorstDevice) -> LeastMemory:
        moved = copy(self)
        moved.device_bytes = device.memory
        return moved

    def on_device(
        self, start: int, ends: States, downstream_workers: int, replicas: int = 1
    ) -> Floats:
        recompute = self.recompute and downstream_workers > 0
        peak = self.memory.settings.peak(downstream_workers)
        of = Replicas(replicas, replicas if self.zero else 1)
        needed = self.memory.total(start, ends, peak, recompute, of)
        for number in range(len(self.memory.classes.members) if self.selective else 0):
            some = self.memory.without_classes(start, ends, peak, number, of)
            needed = np.minimum(needed, some)
        if self.offload:
            needed = np.minimum(needed, self.memory.offloaded(start, ends, peak, of))
        if self.device_bytes == self.reference:
            return needed
        return needed * (self.reference / self.device_bytes)

    def price(self, inner: Floats, shares: Iterable[LevelShare]) -> Floats:
        return inner

    def overhead(self, start: int, ends: States, level: int, replicas: Ints) -> Floats:
        states = np.shape(self.memory.cuts.seconds[ends])
        return np.zeros(np.broadcast_shapes(replicas.shape, states))


def levels(cluster: Cluster) -> tuple[LevelLinks, ...]:
    """The links of each level, innermost first."""
    inner = (1, *cluster.machines)
    return tuple(
        LevelLinks(
            bandwidth,
            inner[level - 1],
            prod(inner[:level]),
            cluster.link(level),
            cluster.ring_link(level),
        )
        for level, bandwidth in enumerate(cluster.bandwidth, start=1)
    )

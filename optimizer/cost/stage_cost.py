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

from pipedream.graph.choices import Recompute
from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost.device_types import WorstDevice
from pipedream.optimizer.cost.memory import MemoryModel
from pipedream.optimizer.cost.models import CostModel, LevelLinks, Terms, Work
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
    up. It determines how many minibatches the stage has in flight.
    """

    depends_on_downstream: bool

    def on(self, device: WorstDevice) -> StageCost:
        """The same question for stages whose worst device is `device`."""

    def on_device(self, start: int, ends: States, downstream_workers: int) -> Floats:
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

    `recompute`: never; in stages that would not fit otherwise (auto); always in all stages but the
    last, whose backward pass follows its forward pass at once (except with gpipe).
    """

    bytes: float
    memory: MemoryModel
    recompute: Recompute = "never"

    def on(self, device: WorstDevice) -> MemoryLimit:
        """The limit with the memory of this device."""
        return replace(self, bytes=device.memory)

    def fits(self, start: int, ends: States, peak: Peak, recompute: bool) -> Bools:
        return self.memory.total(start, ends, peak, recompute) <= self.bytes

    def choose(self, start: int, ends: States, peak: Peak, last: bool) -> tuple[Bools, Bools]:
        """For each stage whether it fits at all, and whether it recomputes.

        `last`: the stages end the pipeline.
        """
        allowed = not last and self.recompute != "never"
        plain = not (allowed and self.recompute == "always")
        fits = self.fits(start, ends, peak, recompute=not plain)
        if not (allowed and plain) or fits.all():
            return fits, np.full_like(fits, not plain)
        return fits | self.fits(start, ends, peak, recompute=True), ~fits


class Priced(ABC):
    """Seconds per minibatch under `model`; subclasses know the size and the cuts of the stages.

    `bytes_across[state]` crosses the state's cut.
    """

    depends_on_downstream = False

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

    def on(self, device: WorstDevice) -> Self:
        moved = super().on(device)
        moved.limit = self.limit and self.limit.on(device)
        return moved

    def parameter_bytes(self, start: int, ends: States) -> Floats:
        parameters: Floats = self.cuts.parameter_bytes[ends] - self.cuts.parameter_bytes[start]
        return parameters

    def on_device(self, start: int, ends: States, downstream_workers: int) -> Floats:
        seconds: Floats = np.maximum(self.cuts.seconds[ends] - self.cuts.seconds[start], 0.0)
        if self.working:
            seconds[self.cuts.working[ends] == self.cuts.working[start]] = np.inf
        if self.limit is not None:
            peak = self.limit.memory.settings.peak(downstream_workers)
            fits, recompute = self.limit.choose(start, ends, peak, last=not downstream_workers)
            forward = self.cuts.forward_seconds
            seconds = seconds + np.where(recompute, forward[ends] - forward[start], 0.0)
            seconds[~fits] = np.inf
        return (seconds + self.cuts.stage_overhead(start)[ends]) / self.speed


class LeastMemory:
    """Bytes on the fullest worker instead of seconds, to find the plan that needs least memory.

    Where devices differ, bytes are scaled as if every device had `reference` of them.
    """

    depends_on_downstream = True

    def __init__(self, memory: MemoryModel, recompute: bool, reference: float = 1.0) -> None:
        self.memory = memory
        self.recompute = recompute
        self.reference = reference
        self.device_bytes = reference

    def on(self, device: WorstDevice) -> LeastMemory:
        moved = copy(self)
        moved.device_bytes = device.memory
        return moved

    def on_device(self, start: int, ends: States, downstream_workers: int) -> Floats:
        recompute = self.recompute and downstream_workers > 0
        peak = self.memory.settings.peak(downstream_workers)
        needed = self.memory.total(start, ends, peak, recompute)
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

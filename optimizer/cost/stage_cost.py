"""The one cost question: how long does this piece of the model take on these devices?

The solver asks a StageCost and does not care who answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipedream.graph.choices import Recompute
from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost.device_types import WorstDevice
from pipedream.optimizer.cost.memory import StageMemory
from pipedream.optimizer.cost.models import CostModel, LevelLinks, Terms, Work, overhead
from pipedream.optimizer.cuts.downsets import Cuts, States
from pipedream.optimizer.cuts.planning_graph import Floats, Ints
from pipedream.schedule.policy import Peak

Bools: TypeAlias = NDArray[np.bool_]


class StageCost(Protocol):
    """Costs of the stages from cut `start` to each of `ends`; infinite if not allowed.

    `downstream_workers` is the number of workers of later stages per worker of this one, rounded
    up. It determines how many minibatches the stage has in flight.
    """

    depends_on_downstream: bool

    def on(self, device: WorstDevice) -> StageCost:
        """The same question where devices are of this grade."""
        ...

    def on_device(self, start: int, ends: States, downstream_workers: int) -> Floats:
        """On one device."""
        ...

    def replicated(
        self, inner: Floats, start: int, ends: States, level: int, replicas: Ints, first: bool
    ) -> Floats:
        """[case, end]: on `replicas[case, 0]` components of `level` (1 innermost), given the cost
        on one component `inner[case, end]`. `first`: it begins the pipeline of its level.
        """
        ...

    def overhead(self, start: int, ends: States, level: int, replicas: Ints) -> Floats:
        """[case, end]: what is left of that with nothing to compute inside and nothing to send over
        a boundary; never less for a stage than for a part of it.
        """
        ...


@dataclass(frozen=True)
class MemoryLimit:
    """What each device has, what is held there, and whether a forward pass may be done again.

    `recompute`: never; in stages that would not fit otherwise; in all stages but the last, whose
    backward pass follows its forward pass at once, but with gpipe.
    """

    bytes: float
    held: StageMemory
    recompute: Recompute = "never"

    def on(self, device: WorstDevice) -> MemoryLimit:
        """With the memory that devices of this grade have."""
        return replace(self, bytes=device.memory)

    def fits(self, start: int, ends: States, peak: Peak, recompute: bool) -> Bools:
        return self.held.total(start, ends, peak, recompute) <= self.bytes

    def choose(self, start: int, ends: States, peak: Peak, last: bool) -> tuple[Bools, Bools]:
        """For each stage whether it fits at all, and whether with recomputation.

        `last`: it ends the pipeline.
        """
        recompute_here = not last and self.recompute != "never"
        plain = not (recompute_here and self.recompute == "always")
        fits = self.fits(start, ends, peak, recompute=not plain)
        if not (recompute_here and plain) or fits.all():
            return fits, np.full_like(fits, not plain)
        return fits | self.fits(start, ends, peak, recompute=True), ~fits


class Priced(ABC):
    """Seconds per minibatch under `model`, of stages whose size and cuts the subclass knows.

    `bytes_across`: of each state, what crosses its cut.
    """

    depends_on_downstream = False

    def __init__(self, cluster: Cluster, model: CostModel, bytes_across: Floats) -> None:
        self.model = model
        self.levels = levels(cluster)
        self.bytes_across = bytes_across
        self.speed = 1.0

    @abstractmethod
    def parameter_bytes(self, start: int, ends: States) -> Floats:
        """Of the stage from `start` to each of `ends`."""

    def on(self, device: WorstDevice) -> Self:
        moved = copy(self)
        moved.speed = device.speed
        return moved

    def replicated(
        self, inner: Floats, start: int, ends: States, level: int, replicas: Ints, first: bool
    ) -> Floats:
        return self.model.seconds(self.terms(inner, start, ends, level, replicas, first))

    def overhead(self, start: int, ends: States, level: int, replicas: Ints) -> Floats:
        parameters = self.parameter_bytes(start, ends)
        return overhead(self.model, parameters, self.levels[level - 1], replicas)

    def terms(
        self, inner: Floats, start: int, ends: States, level: int, replicas: Ints, first: bool
    ) -> Terms:
        """The parts that `replicated` is made of."""
        across = self.bytes_across
        work = Work(inner, self.parameter_bytes(start, ends), float(across[start]), across[ends])
        return self.model.terms(work, self.levels[level - 1], replicas, first)


class Replication(Priced):
    """PipeDream's answer: every component of a stage does the same on other minibatches.

    Costs are seconds per minibatch under `model`. With `working` a stage must take some time.
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
            peak = self.limit.held.settings.peak(downstream_workers)
            fits, recompute_here = self.limit.choose(start, ends, peak, last=not downstream_workers)
            forward = self.cuts.forward_seconds
            seconds = seconds + np.where(recompute_here, forward[ends] - forward[start], 0.0)
            seconds[~fits] = np.inf
        return (seconds + self.cuts.stage_overhead(start)[ends]) / self.speed


class LeastMemory:
    """Bytes on the fullest worker, not seconds: for the plan that needs the least memory.

    Where devices differ, bytes count by what part they are of the device's memory: they are given
    as if every device had `like` of them.
    """

    depends_on_downstream = True

    def __init__(self, held: StageMemory, recompute: bool, like: float = 1.0) -> None:
        self.held = held
        self.recompute = recompute
        self.like = like
        self.memory = like

    def on(self, device: WorstDevice) -> LeastMemory:
        moved = copy(self)
        moved.memory = device.memory
        return moved

    def on_device(self, start: int, ends: States, downstream_workers: int) -> Floats:
        recompute_here = self.recompute and downstream_workers > 0
        needed = self.held.total(
            start, ends, self.held.settings.peak(downstream_workers), recompute_here
        )
        return needed if self.memory == self.like else needed * (self.like / self.memory)

    def replicated(
        self, inner: Floats, start: int, ends: States, level: int, replicas: Ints, first: bool
    ) -> Floats:
        return inner

    def overhead(self, start: int, ends: States, level: int, replicas: Ints) -> Floats:
        return np.zeros(np.broadcast_shapes(replicas.shape, np.shape(self.held.cuts.seconds[ends])))


def levels(cluster: Cluster) -> tuple[LevelLinks, ...]:
    """What a cost model needs to know of each level, innermost first."""
    inner = (1, *cluster.machines)
    return tuple(
        LevelLinks(bandwidth, inner[index], cluster.link(index + 1), cluster.ring_link(index + 1))
        for index, bandwidth in enumerate(cluster.bandwidth)
    )

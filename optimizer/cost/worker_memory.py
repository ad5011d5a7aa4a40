"""The memory of a plan's workers, and how many minibatches they have in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipedream.graph.plan import StageMemory
from pipedream.optimizer.cost.device_types import DeviceTypes, WorstDevice
from pipedream.optimizer.cost.memory import MemoryModel, Replicas, TrainingSettings
from pipedream.optimizer.cost.recomputation import Recomputed
from pipedream.optimizer.cost.stage_cost import MemoryLimit
from pipedream.optimizer.cost.stages import StageOnDevices
from pipedream.schedule.in_flight import warm_up
from pipedream.schedule.policy import Peak


@dataclass(frozen=True)
class WorkerMemory:
    """What a worker of one stage holds, with how many minibatches, what it recomputes, and whether
    replicas divide the optimizer's state (`zero`).

    `max_in_flight` is the limit on minibatches in flight, `peak` what a round really has of it;
    `device` is the worst device of the stage.
    """

    peak: Peak
    max_in_flight: int
    recompute: Recomputed
    memory: StageMemory
    device: WorstDevice
    zero: bool = False

    @property
    def share(self) -> float:
        """The share of the device's memory; above 1 it does not fit."""
        return self.memory.total / self.device.memory


def worker_memory(
    memory: MemoryModel,
    limit: MemoryLimit | None,
    stages: Sequence[StageOnDevices],
    types: DeviceTypes,
) -> list[WorkerMemory]:
    """The memory of each stage's workers with the least in flight, PipeDream's number.

    What a stage recomputes, and whether its replicas divide the optimizer's state, is decided by
    the rules that the search follows.
    """
    least = _warm_ups(stages)
    return [_of_stage(memory, stages, types, least, s, limit) for s in range(len(stages))]


def workers_without_limit(
    stages: Sequence[StageOnDevices],
    settings: TrainingSettings,
    types: DeviceTypes,
    useful: Sequence[int] = (),
) -> list[WorkerMemory]:
    """The workers with as many minibatches in flight as are `useful`, and at least PipeDream's
    number, where memory is no limit: its bytes are left at zero.
    """
    least = _warm_ups(stages)
    in_flight = list(map(max, useful or least, least))
    policy = settings.policy([stage.replicas for stage in stages], in_flight)
    no_bytes = StageMemory(**dict.fromkeys(StageMemory.model_fields, 0.0))
    return [
        WorkerMemory(
            policy.peak(position), count, False, no_bytes, types.worst_of_machines(stage.machines)
        )
        for position, (stage, count) in enumerate(zip(stages, in_flight, strict=True))
    ]


def with_more_in_flight(
    memory: MemoryModel,
    stages: Sequence[StageOnDevices],
    types: DeviceTypes,
    least: list[WorkerMemory],
    useful: Sequence[int],
) -> list[WorkerMemory]:
    """As many minibatches in flight as fit, up to `useful` of each stage, but never fewer than
    `least`, which slower workers than planned would need.
    """
    positions, fewest = range(len(least)), [worker.max_in_flight for worker in least]

    def with_in_flight(position: int, in_flight: Sequence[int]) -> WorkerMemory:
        recompute, zero = least[position].recompute, least[position].zero
        return _of_stage(memory, stages, types, in_flight, position, None, recompute, zero)

    def most(position: int) -> int:
        for count in range(useful[position], fewest[position], -1):
            in_flight = [*fewest[:position], count, *fewest[position + 1 :]]
            if with_in_flight(position, in_flight).share <= 1:
                return count
        return fewest[position]

    wanted = list(map(max, useful, fewest))
    for in_flight in (wanted, [most(position) for position in positions]):
        workers = [with_in_flight(position, in_flight) for position in positions]
        if all(worker.share <= 1 for worker in workers):
            return workers
    return least


def _warm_ups(stages: Sequence[StageOnDevices]) -> list[int]:
    replicas = [stage.replicas for stage in stages]
    return [warm_up(replicas, position) for position in range(len(replicas))]


def _of_stage(
    memory: MemoryModel,
    stages: Sequence[StageOnDevices],
    types: DeviceTypes,
    in_flight: Sequence[int],
    position: int,
    limit: MemoryLimit | None = None,
    recompute: Recomputed = False,
    zero: bool = False,
) -> WorkerMemory:
    """One stage with `in_flight` of each stage; `limit` decides what it recomputes, and whether its
    replicas divide the optimizer's state.
    """
    stage = stages[position]
    policy = memory.settings.policy([stage.replicas for stage in stages], in_flight)
    peak, last = policy.peak(position), position == len(in_flight) - 1
    device = types.worst_of_machines(stage.machines)
    if limit is not None:
        end = slice(stage.end, stage.end + 1)
        limit = limit.on(device)
        parts = limit.replicas(stage.start, end, peak, last, stage.replicas).parts
        zero = bool(np.all(np.asarray(parts) > 1))
    of = Replicas(stage.replicas, stage.replicas if zero else 1)
    if limit is not None:
        recompute = limit.chosen(stage.start, stage.end, peak, last, of)
    items = memory.of(stage.start, stage.end, peak, recompute, of)
    return WorkerMemory(peak, in_flight[position], recompute, items, device, zero)

"""What is to be scheduled: stages, their replicas, when they update, how much they may hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipedream.graph.choices import DEFAULT_ORDER, ScheduleName
from pipedream.schedule.action import StageLink, Worker


@dataclass(frozen=True)
class PipelineSpec:
    """A pipeline, for any number of minibatches.

    `replicas`: of each stage; minibatch b runs at a stage of r replicas on replica b mod r,
    backward where forward went. `links`: the pairs of stages that exchange tensors, adjacent or
    skipping. `weight-stashing` and `vertical-sync` update a stage of r replicas after every r
    times `accumulate` minibatches, the others every stage after `microbatches`. `max_in_flight`:
    the most minibatches between forward and backward on a worker of each stage; None for as many
    as are of use. `tied`: stages that share parameters with one another, whose gradients are added
    up over all of them; only schedules that update all stages at the same minibatches train these.
    `order`: in which order a rank does its passes, by its name in `schedule.ORDERS`.
    `joint_norm`: before each update all workers of all stages agree on the norm of the whole
    model's gradient; only with schedules that update all stages at the same minibatches.
    """

    name: ScheduleName
    replicas: tuple[int, ...]
    links: tuple[StageLink, ...] = ()
    microbatches: int = 1
    accumulate: int = 1
    max_in_flight: tuple[int, ...] | None = None
    tied: tuple[int, ...] = ()
    order: str = DEFAULT_ORDER
    joint_norm: bool = False

    def __post_init__(self) -> None:
        stages = len(self.replicas)
        assert stages > 0, "a pipeline has stages"
        assert min(self.replicas) > 0, self.replicas
        assert self.microbatches > 0, self.microbatches
        assert all(0 <= source < target < stages for source, target in self.links), self.links
        assert self.links == tuple(sorted(set(self.links))), self.links

    @property
    def workers(self) -> Iterator[Worker]:
        for stage in range(len(self.replicas)):
            yield from self.of_stage(stage)

    def of_stage(self, stage: int) -> list[Worker]:
        """Returns its workers, replica by replica."""
        return [(stage, replica) for replica in range(self.replicas[stage])]

    def sources(self, stage: int) -> tuple[int, ...]:
        """Returns the stages that send activations to `stage`."""
        return tuple(source for source, target in self.links if target == stage)

    def targets(self, stage: int) -> tuple[int, ...]:
        """Returns the stages that send gradients to `stage`."""
        return tuple(target for source, target in self.links if source == stage)

    def reduces(self, stage: int) -> bool:
        """Returns whether its gradients are added up with those of other workers."""
        return self.replicas[stage] > 1 or stage in self.tied

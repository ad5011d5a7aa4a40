"""What is to be scheduled: stages, replicas, minibatches, rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pipedream.graph.choices import ScheduleName
from pipedream.schedule.action import Link, Worker
from pipedream.schedule.policy import Policy, policy


@dataclass(frozen=True)
class Pipeline:
    """What is to be scheduled.

    Minibatch b runs at a stage of r replicas on replica b mod r, backward where forward went. A
    round is the run of consecutive minibatches whose mean gradient makes one update of a stage; the
    last round may have fewer. `tied` are the stages that share parameters with other stages: their
    gradients are added up over all of them.
    """

    name: ScheduleName
    replicas: tuple[int, ...]
    links: tuple[Link, ...]
    minibatches: int
    microbatches: int = 1
    tied: tuple[int, ...] = ()
    accumulate: int = 1
    room: tuple[int, ...] | None = None

    @cached_property
    def policy(self) -> Policy:
        return policy(self.name, self.replicas, self.microbatches, self.accumulate, self.room)

    @property
    def workers(self) -> Iterator[Worker]:
        for stage in range(len(self.replicas)):
            yield from self.of_stage(stage)

    def of_stage(self, stage: int) -> list[Worker]:
        """Its workers, replica by replica."""
        return [(stage, replica) for replica in range(self.replicas[stage])]

    def replica(self, stage: int, minibatch: int) -> int:
        return minibatch % self.replicas[stage]

    def sources(self, stage: int) -> tuple[int, ...]:
        """The stages that send activations to `stage`."""
        return tuple(source for source, target in self.links if target == stage)

    def targets(self, stage: int) -> tuple[int, ...]:
        """The stages that send gradients to `stage`."""
        return tuple(target for source, target in self.links if source == stage)

    def round_size(self, stage: int) -> int:
        return self.policy.round_size(stage)

    def in_round(self, stage: int, number: int) -> int:
        """How many minibatches round `number` of `stage` has; 0 past the end."""
        size = self.round_size(stage)
        return max(0, min(size, self.minibatches - number * size))

    def rounds(self, stage: int) -> int:
        """How many updates `stage` makes."""
        return -(-self.minibatches // self.round_size(stage))

    def reduces(self, stage: int) -> bool:
        """Whether its gradients are added up with those of other workers."""
        return self.replicas[stage] > 1 or stage in self.tied

"""What each schedule says: how long a round is, which weights a pass runs on, how much may be held.

`pipedream.schedule.generate` follows these rules and the checker tests its lists against them; the
planner asks how much a worker holds. It is no more than this:

| schedule | one update per | minibatch b of a stage runs on | backward passes |
|---|---|---|---|
| weight-stashing | k r minibatches, k on each replica | the newest version | as they come |
| vertical-sync | k r minibatches | the version as old as the first stage's | as they come |
| 2bw | m minibatches | the version before the newest of its round | as they come |
| flush | m minibatches | its round's only version | as they come |
| gpipe | m minibatches | its round's only version | last first, after all forward passes |

A pass waits until its version has been made. That alone empties the pipeline between the rounds of
flush and gpipe, and keeps 2bw from running further ahead than two versions allow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import ClassVar, NamedTuple

from pipedream.graph.choices import ScheduleName
from pipedream.schedule.in_flight import steady_in_flight, warm_up
from pipedream.schedule.orders.named import ROUND_ORDERS, most_in_flight
from pipedream.schedule.spec import PipelineSpec


class Peak(NamedTuple):
    """The most a worker holds at once: minibatches between forward and backward, and versions of
    its weights (the newest, and those on which a backward pass is still to be run).
    """

    in_flight: int
    versions: int


@dataclass(frozen=True)
class Policy(ABC):
    """Says what one schedule means for a pipeline. Versions of a stage count its updates from 0.

    `microbatches` of the pipeline are the m of the schedules that make one update per m
    minibatches, `accumulate` the k of the others.
    """

    spec: PipelineSpec

    backward_oldest_first: ClassVar[bool] = True
    """Backward passes as they come, oldest minibatch first; else a worker does all its forward
    passes of a round, and then the backward passes, newest minibatch first."""

    uniform_updates: ClassVar[bool] = True
    """All stages run a minibatch on the version of the same number and update at the same
    minibatches, as stages that share parameters have to."""

    drains: ClassVar[bool] = False
    """The pipeline empties after every round."""

    synchronized: ClassVar[bool] = True
    """The replicas of a stage wait for one another again and again, while others go on."""

    set_by_first: ClassVar[bool] = False
    """The version of a minibatch is committed by its forward pass in the first stage."""

    @abstractmethod
    def version(self, stage: int, minibatch: int, newest: int, entered: int) -> int:
        """Returns the version of the weights of `stage` on which `minibatch` runs, forward and
        backward.

        `newest` is what the stage has when its forward pass may begin, `entered` the version on
        which the first stage runs that minibatch. It may be one still to be made: the pass waits.
        """

    @abstractmethod
    def versions(self, stage: int) -> int:
        """Returns how many versions a worker of `stage` holds at most, the newest included."""

    def in_flight(self, stage: int) -> int:
        """Returns the most minibatches between forward and backward on a worker of `stage`."""
        return self.window[stage]

    @cached_property
    def window(self) -> tuple[int, ...]:
        """Returns the bound of each stage: the spec's, or as many as let no worker wait."""
        return self.spec.max_in_flight or steady_in_flight(self.spec.replicas, self.synchronized)

    def peak(self, stage: int) -> Peak:
        """Returns the most that a worker of `stage` holds."""
        return Peak(self.in_flight(stage), self.versions(stage))

    def round_size(self, stage: int) -> int:
        """Returns how many consecutive minibatches make one update of `stage`."""
        return self.spec.microbatches

    def in_round(self, stage: int, number: int, minibatches: int) -> int:
        """Returns how many of `minibatches` round `number` of `stage` has; 0 past the end."""
        size = self.round_size(stage)
        return max(0, min(size, minibatches - number * size))

    @property
    def least_microbatches(self) -> int:
        """Returns the fewest microbatches with which no pass waits for a version."""
        return 1

    def unshared(
        self, parameter: str, stages: Sequence[int], ranks: Sequence[Sequence[int]]
    ) -> str | None:
        """Says why `stages`, which all use the parameter, cannot learn it together, in words; None
        if they can. `ranks`: of every stage.
        """
        holders = f"parameter {parameter} is used in stages {' and '.join(map(str, stages))}"
        if not self.uniform_updates:
            return (
                f"{holders}: with {self.spec.name} each stage would learn its own; use "
                "--schedule flush, gpipe or 2bw, or untie the weights"
            )
        holding_ranks = [rank for stage in stages for rank in ranks[stage]]
        if len(set(holding_ranks)) < len(holding_ranks) and not self.drains:
            return (
                f"{holders}, which share a rank: give these stages different ranks, or train "
                "with --schedule flush or gpipe"
            )
        return None


class WeightStashing(Policy):
    """PipeDream's default (SOSP 2019, section 3.3): w(t+1) = w(t) - lr grad f(w_1(t-n+1), ...,
    w_n(t)) for n stages.
    """

    uniform_updates = False

    def version(self, stage: int, minibatch: int, newest: int, entered: int) -> int:
        return newest

    def versions(self, stage: int) -> int:
        return self.in_flight(stage)

    def round_size(self, stage: int) -> int:
        return self.spec.replicas[stage] * self.spec.accumulate


class VerticalSync(Policy):
    """PipeDream's alternative (SOSP 2019, section 3.3): w(t+1) = w(t) - lr grad f(w_1(t-n+1), ...,
    w_n(t-n+1)) for n stages.

    The version of a minibatch is fixed when it enters the first stage. That version, number v of a
    stage of r_0 replicas, has learned from minibatches 0 to v r_0 - 1; a stage of r replicas uses
    the newest of its versions that has learned from none but these, number floor(v r_0 / r). All
    their backward passes are over when the first stage has made its version, so it is there.
    """

    uniform_updates = False
    set_by_first = True

    def version(self, stage: int, minibatch: int, newest: int, entered: int) -> int:
        return entered * self.spec.replicas[0] // self.spec.replicas[stage] if stage else newest

    def versions(self, stage: int) -> int:
        """Returns how many versions a stage keeps. At the backward pass of minibatch b the stage is
        at version floor(b / s), s = k r; b runs on floor(v s_0 / s). Of the first stage's
        minibatches in flight, F on each replica, the newest is at most v s_0 + s_0 + F r_0 - r_0 -
        1; v s_0 is a multiple of gcd(s_0, s).
        """
        first, here = self.round_size(0), self.round_size(stage)
        window = first + (self.in_flight(0) - 1) * self.spec.replicas[0]
        return -((gcd(first, here) - window) // here) + 1

    def round_size(self, stage: int) -> int:
        return self.spec.replicas[stage] * self.spec.accumulate


class DoubleBuffered(Policy):
    """PipeDream-2BW, double-buffered weights (Narayanan et al., "Memory-Efficient Pipeline-Parallel
    DNN Training", ICML 2021, section 3.1): W(t+1) = W(t) - lr grad f(W(t-1)), f the mean over m
    minibatches. No flush: while the last minibatches of a round run on W(t-1), the first of the
    next one do on W(t).
    """

    def version(self, stage: int, minibatch: int, newest: int, entered: int) -> int:
        return max(0, minibatch // self.spec.microbatches - 1)

    def versions(self, stage: int) -> int:
        return 2

    @property
    def least_microbatches(self) -> int:
        """Returns as many as `warm_up` has in flight at any stage, so that those lie in two rounds:
        for stages of one replica the paper's m >= d, the depth. Where stages have several, replicas
        wait for one another less if it is a multiple of each of their numbers.
        """
        replicas = self.spec.replicas
        return max(warm_up(replicas, stage) * count for stage, count in enumerate(replicas))


class Flush(Policy):
    """1F1B with a flush every m minibatches: equal to plain training on batches of m."""

    synchronized = False
    drains = True

    def version(self, stage: int, minibatch: int, newest: int, entered: int) -> int:
        return minibatch // self.spec.microbatches

    def versions(self, stage: int) -> int:
        return 1

    def in_flight(self, stage: int) -> int:
        """Returns how many minibatches are in flight: at most a round's, or `warm_up` if that is
        more; never above the window. An order of passes of its own says how many by itself.
        """
        if self.spec.order in ROUND_ORDERS:
            return self._in_order[stage]
        of_round = -(-self.spec.microbatches // self.spec.replicas[stage])
        return min(self.window[stage], max(of_round, warm_up(self.spec.replicas, stage)))

    @cached_property
    def _in_order(self) -> tuple[int, ...]:
        return most_in_flight(self.spec)


class GPipe(Flush):
    """All forward passes of a round, then all backward passes (Huang et al., "GPipe", NeurIPS 2019,
    section 2.3 and figure 2c), in the paper's reverse order: what was saved last is used first.

    Learns what flush learns, and holds more: all m minibatches of a round.
    """

    backward_oldest_first = False

    def in_flight(self, stage: int) -> int:
        return -(-self.spec.microbatches // self.spec.replicas[stage])


_POLICIES: dict[ScheduleName, type[Policy]] = {
    "weight-stashing": WeightStashing,
    "vertical-sync": VerticalSync,
    "2bw": DoubleBuffered,
    "flush": Flush,
    "gpipe": GPipe,
}


def policy(spec: PipelineSpec) -> Policy:
    """Returns what the schedule of that name says of the pipeline."""
    return _POLICIES[spec.name](spec)


def uniform_updates(name: ScheduleName) -> bool:
    """Returns whether the schedule of that name updates all stages at the same minibatches."""
    return _POLICIES[name].uniform_updates


def updates_in_place(name: ScheduleName) -> bool:
    """Returns whether the schedule of that name keeps no older version of weights, so that a step
    copies none.
    """
    return _POLICIES[name].drains

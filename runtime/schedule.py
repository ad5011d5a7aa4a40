"""The one description of the order of things: what each worker of a pipeline does, and when.

A schedule is made by playing one-forward-one-backward (1F1B; PipeDream, SOSP 2019, section 3.2)
greedily in unit time and writing down the order that comes out. It fits any replica counts, and it
cannot deadlock: the play itself is an order in which everything could be done.

Pure: no torch, no processes. The engine executes `Schedule.actions`, the simulator times them,
`chart` draws the play, `pipedream.runtime.checker` proves it sound.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

Worker: TypeAlias = tuple[int, int]
"""(stage, replica)."""

Link: TypeAlias = tuple[int, int]
"""(source stage, target stage): the activation goes forward, its gradient comes back."""

ScheduleName: TypeAlias = Literal["weight-stashing", "flush"]


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"
    ALL_REDUCE = "AR"
    UPDATE = "U"


_TEXT = re.compile(
    r"(?P<stage>\d+)(\.(?P<replica>\d+))?(?P<kind>[A-Z]+)(?P<minibatch>\d+)"
    r"(/(?P<divisor>\d+))?(@(?P<version>\d+))?([<>](?P<peer>\d+)(\.(?P<peer_replica>\d+))?)?"
)


class Action(NamedTuple):
    """One thing one worker does.

    `version` is the version of the worker's own weights: the one used by a forward or backward pass
    (and by the messages that belong to it), the one made by an all-reduce and its update. An
    all-reduce and an update stand for the round that begins with `minibatch`; the gradients of its
    `divisor` minibatches are added up over the replicas (each adds those of the minibatches that
    ran on it: some, one or none) and divided by `divisor`.

    Prints as `2F0` (stage 2, forward, minibatch 0); in full `0.1SA5@3>1.2` (replica 1 of stage 0
    sends the activation of minibatch 5, computed on version 3, to replica 2 of stage 1) and
    `0.1AR4/3@2` (all-reduce of minibatches 4 to 6, for version 2). What is 0, and a divisor of 1,
    is left out.
    """

    kind: Kind
    stage: int
    replica: int
    minibatch: int
    version: int
    peer: Worker | None = None
    divisor: int = 1

    @property
    def worker(self) -> str:
        """`2` for replica 0 of stage 2, `2.1` for replica 1."""
        return show_worker((self.stage, self.replica))

    def __str__(self) -> str:
        divisor = "" if self.divisor == 1 else f"/{self.divisor}"
        version = f"@{self.version}" if self.version else ""
        peer = ""
        if self.peer is not None:
            sends = self.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
            peer = (">" if sends else "<") + show_worker(self.peer)
        return f"{self.worker}{self.kind}{self.minibatch}{divisor}{version}{peer}"


def parse_action(text: str) -> Action:
    """The action that prints as `text`. Raises ValueError."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no action: expected something like 2F0 or 0.1SA5@3>1.2")
    number = {name: int(value or 0) for name, value in match.groupdict().items() if name != "kind"}
    return Action(
        kind=Kind(match["kind"]),
        stage=number["stage"],
        replica=number["replica"],
        minibatch=number["minibatch"],
        version=number["version"],
        peer=(number["peer"], number["peer_replica"]) if match["peer"] else None,
        divisor=number["divisor"] if match["divisor"] else 1,
    )


def show_worker(worker: Worker) -> str:
    """`2` for replica 0 of stage 2, `2.1` for replica 1."""
    stage, replica = worker
    return f"{stage}.{replica}" if replica else f"{stage}"


def warm_up(replicas: Sequence[int], stage: int) -> int:
    """How many minibatches each replica of `stage` has in flight at most.

    The workers from this stage to the last, shared among the replicas of this stage; for stage 0 it
    is PipeDream's NOAM, the number of optimal active minibatches (SOSP 2019, section 3.2).
    """
    return -(-sum(replicas[stage:]) // replicas[stage])


class Step(NamedTuple):
    """A forward or backward pass in the play, and the unit of time in which it runs."""

    time: int
    kind: Kind
    minibatch: int


@dataclass(frozen=True)
class Pipeline:
    """What is to be scheduled.

    Minibatch b runs at a stage of r replicas on replica b mod r, backward where forward went. A
    round is the run of consecutive minibatches whose mean gradient makes one update of a stage: r
    of them with weight stashing, `microbatches` with flush; the last round may have fewer.
    `tied` are the stages that share parameters with other stages: with flush their gradients are
    added up over all of them.
    """

    name: ScheduleName
    replicas: tuple[int, ...]
    links: tuple[Link, ...]
    minibatches: int
    microbatches: int = 1
    tied: tuple[int, ...] = ()

    @property
    def workers(self) -> Iterator[Worker]:
        for stage, count in enumerate(self.replicas):
            for replica in range(count):
                yield stage, replica

    def replica(self, stage: int, minibatch: int) -> int:
        return minibatch % self.replicas[stage]

    def sources(self, stage: int) -> tuple[int, ...]:
        """The stages that send activations to `stage`."""
        return tuple(source for source, target in self.links if target == stage)

    def targets(self, stage: int) -> tuple[int, ...]:
        """The stages that send gradients to `stage`."""
        return tuple(target for source, target in self.links if source == stage)

    def round_size(self, stage: int) -> int:
        return self.microbatches if self.name == "flush" else self.replicas[stage]

    def in_round(self, stage: int, number: int) -> int:
        """How many minibatches round `number` of `stage` has; 0 past the end."""
        size = self.round_size(stage)
        return max(0, min(size, self.minibatches - number * size))


@dataclass(frozen=True)
class Schedule(Pipeline):
    """The passes of each worker in their order; `actions` adds what goes around them."""

    @cached_property
    def steps(self) -> Mapping[Worker, Sequence[Step]]:
        return _Play(self).run()

    def actions(self, worker: Worker) -> list[Action]:
        """All that `worker` does, in order.

        Receives stand right before the pass that needs them, sends right after the pass that makes
        them. After a worker's last backward pass of a round come ALL_REDUCE (only where the stage
        has several replicas or is tied; it waits for all of them) and UPDATE. A replica with no
        minibatch in a round takes part in both all the same.
        """
        writer = _Writer(self, worker)
        for step in self.steps[worker]:
            writer.write(step)
        return writer.actions


def schedule(
    name: ScheduleName,
    replicas: Sequence[int],
    links: Collection[Link],
    minibatches: int,
    microbatches: int = 1,
    tied: Collection[int] = (),
) -> Schedule:
    """The schedule of one epoch, drained at its end; weight versions count from 0.

    `replicas` per stage; `links` are the pairs of stages that exchange tensors, adjacent or
    skipping. `weight-stashing` updates a stage of r replicas after every r minibatches, and leaves
    `microbatches` aside; `flush` updates every stage after `microbatches` minibatches, all of them
    run on the same version. `tied` are stages that share parameters with one another, which only
    flush can train.
    """
    stages = len(replicas)
    assert stages > 0, "a pipeline has stages"
    assert min(replicas) > 0, replicas
    assert all(0 <= source < target < stages for source, target in links), links
    assert minibatches >= 0, minibatches
    assert microbatches > 0, microbatches
    assert not tied or name == "flush", "tied stages need one version of the weights for all"
    ordered = tuple(sorted(set(links)))
    return Schedule(name, tuple(replicas), ordered, minibatches, microbatches, tuple(tied))


class _Play:
    """1F1B in unit time, every pass one unit.

    Each unit every free worker takes its next backward pass if the gradients are there, else its
    next forward pass if the activations are there and fewer than `warm_up` minibatches are in
    flight. A worker takes its minibatches in ascending order both ways, so the messages between
    two workers have the same order at both ends. Having done its backward passes of a round it
    waits for the other replicas of its stage; with flush no minibatch of the next round begins
    before that.

    It always ends: the smallest minibatch that is not done everywhere finds no smaller one in its
    way, be it in flight or in a round.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        stages, minibatches = len(pipeline.replicas), pipeline.minibatches
        self.pipeline = pipeline
        self.steps: dict[Worker, list[Step]] = {worker: [] for worker in pipeline.workers}
        self.limit = [warm_up(pipeline.replicas, stage) for stage in range(stages)]
        # When the pass of a minibatch at a stage is over; a far future where it has not begun.
        never = 4 * (minibatches + 1) * stages
        self.forward_over = [[never] * minibatches for _ in range(stages)]
        self.backward_over = [[never] * minibatches for _ in range(stages)]
        self.activations = [
            [self.forward_over[s] for s in pipeline.sources(t)] for t in range(stages)
        ]
        self.gradients = [
            [self.backward_over[t] for t in pipeline.targets(s)] for s in range(stages)
        ]
        self.next_forward = {worker: worker[1] for worker in pipeline.workers}
        self.next_backward = {worker: worker[1] for worker in pipeline.workers}
        self.round_size = [pipeline.round_size(stage) for stage in range(stages)]
        self.round = [0] * stages
        self.round_left = [pipeline.in_round(stage, 0) for stage in range(stages)]
        self.round_begins = [0] * stages

    def run(self) -> dict[Worker, list[Step]]:
        left = 2 * self.pipeline.minibatches * len(self.pipeline.replicas)
        time = 0
        while left:
            moved = sum(self._move(worker, time) for worker in self.steps)
            assert moved, f"nobody can move at time {time}"
            left -= moved
            time += 1
        return self.steps

    def _move(self, worker: Worker, time: int) -> bool:
        """Lets `worker` begin a pass at `time`; whether it could."""
        stage = worker[0]
        oldest = self.next_backward[worker]
        if oldest >= self.pipeline.minibatches or time < self.round_begins[stage]:
            return False
        if oldest // self.round_size[stage] != self.round[stage]:
            return False
        if self._may_go_backward(stage, oldest, time):
            self._go_backward(worker, oldest, time)
            return True
        if self._may_go_forward(worker, time):
            self._go_forward(worker, time)
            return True
        return False

    def _may_go_backward(self, stage: int, minibatch: int, time: int) -> bool:
        if self.forward_over[stage][minibatch] > time:
            return False
        return all(over[minibatch] <= time for over in self.gradients[stage])

    def _may_go_forward(self, worker: Worker, time: int) -> bool:
        stage = worker[0]
        minibatch = self.next_forward[worker]
        if minibatch >= self.pipeline.minibatches:
            return False
        in_flight = (minibatch - self.next_backward[worker]) // self.pipeline.replicas[stage]
        if in_flight >= self.limit[stage]:
            return False
        of_round = minibatch // self.round_size[stage]
        if self.pipeline.name == "flush" and of_round != self.round[stage]:
            return False
        return all(over[minibatch] <= time for over in self.activations[stage])

    def _go_forward(self, worker: Worker, time: int) -> None:
        stage = worker[0]
        minibatch = self.next_forward[worker]
        self.steps[worker].append(Step(time, Kind.FORWARD, minibatch))
        self.forward_over[stage][minibatch] = time + 1
        self.next_forward[worker] += self.pipeline.replicas[stage]

    def _go_backward(self, worker: Worker, minibatch: int, time: int) -> None:
        stage = worker[0]
        self.steps[worker].append(Step(time, Kind.BACKWARD, minibatch))
        self.backward_over[stage][minibatch] = time + 1
        self.next_backward[worker] += self.pipeline.replicas[stage]
        self.round_left[stage] -= 1
        if not self.round_left[stage]:
            self.round[stage] += 1
            self.round_left[stage] = self.pipeline.in_round(stage, self.round[stage])
            self.round_begins[stage] = time + 1


class _Writer:
    """Writes the passes of one worker down with their messages and updates."""

    def __init__(self, pipeline: Pipeline, worker: Worker) -> None:
        self.pipeline = pipeline
        self.stage, self.replica = worker
        self.sources = pipeline.sources(self.stage)
        self.targets = pipeline.targets(self.stage)
        self.version = 0
        self.version_of: dict[int, int] = {}
        self.actions: list[Action] = []
        self._close_rounds(before=self.replica)

    def write(self, step: Step) -> None:
        minibatch = step.minibatch
        if step.kind is Kind.FORWARD:
            version = self.version_of[minibatch] = self.version
            self._messages(Kind.RECV_ACTIVATION, self.sources, minibatch, version)
            self._add(Kind.FORWARD, minibatch, version)
            self._messages(Kind.SEND_ACTIVATION, self.targets, minibatch, version)
        else:
            version = self.version_of.pop(minibatch)
            self._messages(Kind.RECV_GRADIENT, self.targets, minibatch, version)
            self._add(Kind.BACKWARD, minibatch, version)
            self._messages(Kind.SEND_GRADIENT, self.sources, minibatch, version)
            self._close_rounds(before=minibatch + self.pipeline.replicas[self.stage])

    def _messages(self, kind: Kind, stages: Sequence[int], minibatch: int, version: int) -> None:
        for stage in stages:
            peer = (stage, self.pipeline.replica(stage, minibatch))
            self._add(kind, minibatch, version, peer)

    def _close_rounds(self, before: int) -> None:
        """All-reduce and update for the rounds that lie before minibatch `before`, its next one."""
        size = self.pipeline.round_size(self.stage)
        while divisor := self.pipeline.in_round(self.stage, self.version):
            first = self.version * size
            if before < min(first + size, self.pipeline.minibatches):
                break
            self.version += 1
            if self.pipeline.replicas[self.stage] > 1 or self.stage in self.pipeline.tied:
                self._add(Kind.ALL_REDUCE, first, self.version, divisor=divisor)
            self._add(Kind.UPDATE, first, self.version, divisor=divisor)

    def _add(
        self, kind: Kind, minibatch: int, version: int, peer: Worker | None = None, divisor: int = 1
    ) -> None:
        self.actions.append(
            Action(kind, self.stage, self.replica, minibatch, version, peer, divisor)
        )


def chart(schedule: Schedule) -> str:
    """The play as text: a row for each worker, a column for each unit of time.

    For replicas (1, 1) and four minibatches:

        0  F0 F1 .  B0 F2 B1 F3 B2 .  B3
        1  .  F0 B0 F1 B1 F2 B2 F3 B3
    """
    width = max(4, len(str(schedule.minibatches)) + 2)
    lines = []
    for worker, steps in schedule.steps.items():
        cells = ["."] * (steps[-1].time + 1 if steps else 0)
        for step in steps:
            cells[step.time] = f"{step.kind}{step.minibatch}"
        label = show_worker(worker).ljust(width)
        lines.append((label + "".join(cell.ljust(width) for cell in cells)).rstrip())
    return "\n".join(lines)

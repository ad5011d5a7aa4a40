"""The one description of the order of things: what each worker of a pipeline does, and when.

A schedule is made by playing its rules (`pipedream.runtime.policy`) as a balanced pipeline would
and writing down the order that comes out. That fits any replica counts, and it cannot deadlock: the
play itself is an order in which everything could be done.

Pure: no torch, no processes. The engine executes `Schedule.actions`, the simulator times them,
`chart` draws the play, `pipedream.runtime.checker` proves it sound.

Two kinds of schedule are still to come, and each is one more generator of passes:

- A backward pass in two halves, the gradients of the inputs first and those of the weights when
  there is time (zero bubble): two more kinds of `Step` and of `Action` that stand where `B` does
  now; what goes around a pass hangs on its kind alone, gradients are sent after the first half and
  a round closes with the second. The engine's table gets a method for each.
- Several stages on one rank (interleaved): an action names its stage, not its rank, and a rank may
  do the actions of several workers. The play asks whether a worker is free; with several on a rank
  it asks that of the rank. `peer` is a worker, too: which rank that is, the engine looks up, and it
  would look up the state of a stage by `Action.stage` in the same way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import inf
from typing import NamedTuple, TypeAlias

from pipedream.graph.schedule_name import ScheduleName
from pipedream.runtime.policy import Policy, policy

Worker: TypeAlias = tuple[int, int]
"""(stage, replica)."""

Link: TypeAlias = tuple[int, int]
"""(source stage, target stage): the activation goes forward, its gradient comes back."""


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"
    ALL_REDUCE = "AR"
    UPDATE = "U"

    # An enum's own is Python code, and kinds are looked up for every action.
    __hash__ = str.__hash__


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


def uses(actions: Iterable[Action]) -> Counter[int]:
    """How many minibatches run on each version of a worker's weights, given its actions."""
    return Counter(action.version for action in actions if action.kind is Kind.FORWARD)


class Versions:
    """The versions of a worker's weights that there are while it goes through its actions: the
    newest, and those on which a minibatch has yet to go backward, be it in flight or still to come.
    """

    def __init__(self, actions: Iterable[Action]) -> None:
        self.left = uses(actions)
        self.newest = 0
        self.alive = {0}

    def gone_backward(self, version: int) -> None:
        """A minibatch has, on `version`."""
        self.left[version] -= 1
        if not self.left[version] and version != self.newest:
            self.alive.remove(version)

    def updated(self) -> None:
        """There is a new version."""
        if not self.left[self.newest]:
            self.alive.remove(self.newest)
        self.newest += 1
        self.alive.add(self.newest)


class Step(NamedTuple):
    """A forward or backward pass in the play: when it begins, and the version of the weights it
    runs on.
    """

    time: int
    kind: Kind
    minibatch: int
    version: int


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


@dataclass(frozen=True)
class Schedule(Pipeline):
    """The passes of each worker in their order; `actions` adds what goes around them."""

    @cached_property
    def steps(self) -> Mapping[Worker, Sequence[Step]]:
        found: dict[Worker, list[Step]] = {worker: [] for worker in self.workers}
        for worker, step in _Play(self).steps():
            found[worker].append(step)
        return found

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
    accumulate: int = 1,
    room: Sequence[int] | None = None,
) -> Schedule:
    """The schedule of one epoch, drained at its end; weight versions count from 0.

    `replicas` per stage; `links` are the pairs of stages that exchange tensors, adjacent or
    skipping. `weight-stashing` and `vertical-sync` update a stage of r replicas after every r
    times `accumulate` minibatches, the others every stage after `microbatches`.
    `tied` are stages that share parameters with one another, which only those others can train.
    `room` for minibatches in flight on a worker of each stage; None: for as many as are of use.
    """
    stages = len(replicas)
    assert stages > 0, "a pipeline has stages"
    assert min(replicas) > 0, replicas
    assert all(0 <= source < target < stages for source, target in links), links
    assert minibatches >= 0, minibatches
    assert microbatches > 0, microbatches
    ordered = tuple(sorted(set(links)))
    given = None if room is None else tuple(room)
    made = Schedule(
        name, tuple(replicas), ordered, minibatches, microbatches, tuple(tied), accumulate, given
    )
    assert not tied or made.policy.same_everywhere, "tied stages learn at the same minibatches"
    return made


def forwards(
    replicas: Sequence[int], links: Collection[Link], minibatches: int, worker: Worker
) -> list[Action]:
    """What `worker` does where there are forward passes alone, as in evaluation.

    Minibatches in ascending order on every worker, on version 0: it cannot deadlock, whatever is
    waited for, since all that a pass needs comes from earlier stages and smaller minibatches.
    """
    stage, replica = worker
    sources = sorted(source for source, target in set(links) if target == stage)
    targets = sorted(target for source, target in set(links) if source == stage)
    actions: list[Action] = []
    for b in range(replica, minibatches, replicas[stage]):
        for source in sources:
            peer = source, b % replicas[source]
            actions.append(Action(Kind.RECV_ACTIVATION, stage, replica, b, 0, peer))
        actions.append(Action(Kind.FORWARD, stage, replica, b, 0))
        for target in targets:
            peer = target, b % replicas[target]
            actions.append(Action(Kind.SEND_ACTIVATION, stage, replica, b, 0, peer))
    return actions


class _Play:
    """A schedule's rules in a balanced pipeline: a pass of a stage of r replicas takes r units.

    A worker goes forward until as many minibatches are in flight as the rules allow, and from then
    on backward and forward in turn: it rather waits for the activations of the next minibatch than
    go backward early and wait later, when all workers could be busy. It goes backward at once where
    there is nothing to go forward with: all minibatches are in, or the weights for the next one
    are those of an update that these backward passes make. A worker goes forward in ascending order
    of the minibatches and backward in that order or, round by round, in the opposite one: always in
    one that all stages share, so that the messages between two workers have the same order at both
    ends. Having done its backward passes of a round it waits for the other replicas of its stage.

    Where there is less room than the steady state needs, all may wait for a minibatch that cannot
    come: then the first that can go backward does. So it always ends: in its way a minibatch finds
    only smaller ones and, within a round of all forward passes first, the backward passes of larger
    ones that wait for nothing but forward passes.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        policy, stages = pipeline.policy, range(len(pipeline.replicas))
        self.pipeline = pipeline
        self.minibatches = pipeline.minibatches
        self.in_turn, self.version = policy.in_turn, policy.version
        self.limit = [policy.in_flight(stage) for stage in stages]
        self.round_size = [policy.round_size(stage) for stage in stages]
        # When the pass of a minibatch at a stage is over.
        self.forward_over = [[inf] * pipeline.minibatches for _ in stages]
        self.backward_over = [[inf] * pipeline.minibatches for _ in stages]
        first = {0} if policy.set_by_first else set()
        self.before_forward = [
            [self.forward_over[s] for s in first.union(pipeline.sources(t)) if s < t]
            for t in stages
        ]
        self.before_backward = [
            [self.backward_over[t] for t in pipeline.targets(s)] for s in stages
        ]
        self.next_forward = {worker: worker[1] for worker in pipeline.workers}
        self.in_flight: dict[Worker, list[int]] = {worker: [] for worker in pipeline.workers}
        self.busy_until = dict.fromkeys(pipeline.workers, 0)
        self.version_of = [[0] * pipeline.minibatches for _ in stages]
        self.round = [0] * len(stages)
        self.round_left = [pipeline.in_round(stage, 0) for stage in stages]
        self.round_begins = [0] * len(stages)

    def steps(self) -> Iterator[tuple[Worker, Step]]:
        """The passes in the order of time."""
        left = 2 * self.minibatches * len(self.round)
        time, patient = 0, True
        while left:
            for worker, busy_until in self.busy_until.items():
                step = self._step(worker, time, patient) if busy_until <= time else None
                if step is not None:
                    yield worker, step
                    left -= 1
            ends = [end for end in self.busy_until.values() if end > time]
            assert ends or patient, f"nobody can move at time {time}"
            time, patient = min(ends, default=time), bool(ends)

    def _step(self, worker: Worker, time: int, patient: bool) -> Step | None:
        """What `worker` begins at `time`."""
        stage = worker[0]
        if time < self.round_begins[stage]:
            return None
        in_flight, coming = self.in_flight[worker], self.next_forward[worker]
        oldest = in_flight[0] if in_flight else coming
        if oldest // self.round_size[stage] != self.round[stage]:
            return None
        if self._may_go_forward(worker):
            step = self._go_forward(worker, time)
            if step is not None or patient:
                return step
        if in_flight and self._may_go_backward(worker, time):
            return self._go_backward(worker, time)
        return None

    def _may_go_forward(self, worker: Worker) -> bool:
        """Whether the rules let it go forward before anything goes backward."""
        stage, coming = worker[0], self.next_forward[worker]
        if coming >= self.minibatches or len(self.in_flight[worker]) >= self.limit[stage]:
            return False
        return self._version(stage, coming) <= self.round[stage]

    def _version(self, stage: int, minibatch: int) -> int:
        newest = self.round[stage]
        return self.version(stage, minibatch, newest, self.version_of[0][minibatch])

    def _may_go_backward(self, worker: Worker, time: int) -> bool:
        stage = worker[0]
        if self.in_turn:
            minibatch = self.in_flight[worker][0]
        else:
            coming = self.next_forward[worker]
            ends = min((self.round[stage] + 1) * self.round_size[stage], self.minibatches)
            if coming < ends:
                return False
            minibatch = self.in_flight[worker][-1]
        if self.forward_over[stage][minibatch] > time:
            return False
        return all(over[minibatch] <= time for over in self.before_backward[stage])

    def _go_forward(self, worker: Worker, time: int) -> Step | None:
        """The next forward pass, if there is all that it needs."""
        stage = worker[0]
        minibatch = self.next_forward[worker]
        for over in self.before_forward[stage]:
            if over[minibatch] > time:
                return None
        version = self._version(stage, minibatch)
        self.version_of[stage][minibatch] = version
        self.forward_over[stage][minibatch] = self._ends(worker, time)
        self.next_forward[worker] += self.pipeline.replicas[stage]
        self.in_flight[worker].append(minibatch)
        return Step(time, Kind.FORWARD, minibatch, version)

    def _go_backward(self, worker: Worker, time: int) -> Step:
        stage = worker[0]
        minibatch = self.in_flight[worker].pop(0 if self.in_turn else -1)
        over = self.backward_over[stage][minibatch] = self._ends(worker, time)
        self.round_left[stage] -= 1
        if not self.round_left[stage]:
            self.round[stage] += 1
            self.round_left[stage] = self.pipeline.in_round(stage, self.round[stage])
            self.round_begins[stage] = over
        return Step(time, Kind.BACKWARD, minibatch, self.version_of[stage][minibatch])

    def _ends(self, worker: Worker, time: int) -> int:
        """When a pass that `worker` begins now is over."""
        self.busy_until[worker] = time + self.pipeline.replicas[worker[0]]
        return self.busy_until[worker]


class _Writer:
    """Writes the passes of one worker down with their messages and updates."""

    def __init__(self, pipeline: Pipeline, worker: Worker) -> None:
        self.pipeline = pipeline
        self.stage, self.replica = worker
        self.sources = pipeline.sources(self.stage)
        self.targets = pipeline.targets(self.stage)
        self.round = 0
        self.left = self._own()
        self.actions: list[Action] = []
        self._close_rounds()

    def write(self, step: Step) -> None:
        minibatch, version = step.minibatch, step.version
        if step.kind is Kind.FORWARD:
            self._messages(Kind.RECV_ACTIVATION, self.sources, minibatch, version)
            self._add(Kind.FORWARD, minibatch, version)
            self._messages(Kind.SEND_ACTIVATION, self.targets, minibatch, version)
        else:
            self._messages(Kind.RECV_GRADIENT, self.targets, minibatch, version)
            self._add(Kind.BACKWARD, minibatch, version)
            self._messages(Kind.SEND_GRADIENT, self.sources, minibatch, version)
            self.left -= 1
            self._close_rounds()

    def _messages(self, kind: Kind, stages: Sequence[int], minibatch: int, version: int) -> None:
        for stage in stages:
            peer = (stage, self.pipeline.replica(stage, minibatch))
            self._add(kind, minibatch, version, peer)

    def _close_rounds(self) -> None:
        """All-reduce and update for the rounds in which this worker has nothing left to do."""
        while not self.left and (divisor := self.pipeline.in_round(self.stage, self.round)):
            first = self.round * self.pipeline.round_size(self.stage)
            self.round += 1
            self.left = self._own()
            if self.pipeline.reduces(self.stage):
                self._add(Kind.ALL_REDUCE, first, self.round, divisor=divisor)
            self._add(Kind.UPDATE, first, self.round, divisor=divisor)

    def _own(self) -> int:
        """How many minibatches of the round run on this worker."""
        first = self.round * self.pipeline.round_size(self.stage)
        count, replicas = (
            self.pipeline.in_round(self.stage, self.round),
            self.pipeline.replicas[self.stage],
        )
        return len(range((self.replica - first) % replicas, count, replicas))

    def _add(
        self, kind: Kind, minibatch: int, version: int, peer: Worker | None = None, divisor: int = 1
    ) -> None:
        self.actions.append(
            Action(kind, self.stage, self.replica, minibatch, version, peer, divisor)
        )


def chart(schedule: Schedule) -> str:
    """The play as text: a row for each worker, a column for each unit of time.

    For replicas (1, 1) and four minibatches, and for (1, 2) and three:

        0  F0 F1 .  B0 F2 B1 F3 B2 .  B3
        1  .  F0 B0 F1 B1 F2 B2 F3 B3

        0    F0 F1 F2 .  .  .  B0 B1 .  .  B2
        1    .  F0 -  B0 -  .  F2 -  B2 -
        1.1  .  .  F1 -  B1 -
    """
    width = max(4, len(str(schedule.minibatches)) + 2)
    lines = []
    for (stage, replica), steps in schedule.steps.items():
        takes = schedule.replicas[stage]
        cells = ["."] * (steps[-1].time + takes if steps else 0)
        for step in steps:
            cells[step.time : step.time + takes] = ["-"] * takes
            cells[step.time] = f"{step.kind}{step.minibatch}"
        label = show_worker((stage, replica)).ljust(width)
        lines.append((label + "".join(cell.ljust(width) for cell in cells)).rstrip())
    return "\n".join(lines)

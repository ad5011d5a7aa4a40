"""The one description of the order of things: what each worker of a pipeline does, and when.

A schedule is made by playing its rules (`policy`) as a balanced pipeline would (`play`) and writing
down the order that comes out. That fits any replica counts, and it cannot deadlock: the play itself
is an order in which everything could be done.

Pure: no torch, no processes. The engine executes `Schedule.actions`, the simulator times them,
`chart` draws the play, `checker` proves it sound; all of them in `pipedream.runtime`.

Two kinds of schedule are still to come. Each is one more generator of passes, which `written` makes
the list of a rank; tests/support/pipelines.py has one of either kind, which the checker proves and
the engine does:

- A backward pass in two halves, the gradients of the inputs first and those of the weights when
  there is time (zero bubble): steps BACKWARD_INPUT and BACKWARD_WEIGHT in the place of BACKWARD.
  Gradients are received before the first half and sent after it, a round closes with the second.
- Several stages on one rank (interleaved): a rank's list has the actions of several workers, and
  the engine an executor for each. What a generator of such lists has to see to: messages between
  two ranks have one order, whatever their stages (`checker`).

Both run in the engine alone. plan.json refuses a rank in two stages, and pd-train makes one stage
for each rank: `Rank`, `Member`, `Saver`, `held_out` and the report have one. A norm of the whole
gradient is added up over the ranks at each stage's update (`stepping`), which is once too often
where a rank has two. `Play` asks whether a worker is free, not its rank, and `policy` says what a
worker may hold without regard to the halves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from pipedream.graph.choices import ScheduleName
from pipedream.schedule.action import ENDS_BACKWARD, Action, Kind, Link, Worker
from pipedream.schedule.generate import Play, Step
from pipedream.schedule.spec import Pipeline


@dataclass(frozen=True)
class Schedule(Pipeline):
    """The passes of each worker in their order; `actions` adds what goes around them."""

    @cached_property
    def steps(self) -> Mapping[Worker, Sequence[Step]]:
        found: dict[Worker, list[Step]] = {worker: [] for worker in self.workers}
        for worker, step in Play(self).steps():
            found[worker].append(step)
        return found

    def actions(self, worker: Worker) -> list[Action]:
        """All that `worker` does, in order."""
        return written(self, [worker], ((worker, step) for step in self.steps[worker]))


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


def written(
    pipeline: Pipeline, workers: Collection[Worker], passes: Iterable[tuple[Worker, Step]]
) -> list[Action]:
    """All that a rank with these `workers` does, in order, given their passes.

    Receives stand right before the pass that needs them, sends right after the pass that makes
    them. After a worker's last backward pass of a round come ALL_REDUCE (only where the stage
    has several replicas or is tied; it waits for all of them) and UPDATE. A replica with no
    minibatch in a round takes part in both all the same. Of a backward pass in two halves the first
    is what receives and sends, the second what closes a round.
    """
    actions: list[Action] = []
    writers = {worker: _Writer(pipeline, worker, actions) for worker in workers}
    for worker, step in passes:
        writers[worker].write(step)
    return actions


_Messages: TypeAlias = tuple[Kind, Sequence[Sequence[Worker]], Kind, Sequence[Sequence[Worker]]]
"""Of a pass: what is received before it, from the workers of which stages, and what is sent then.
"""


class _Writer:
    """Writes the passes of one worker down with their messages and updates."""

    def __init__(self, pipeline: Pipeline, worker: Worker, actions: list[Action]) -> None:
        self.pipeline, self.actions = pipeline, actions
        self.stage, self.replica = worker
        self.replicas = pipeline.replicas[self.stage]
        self.round_size = pipeline.round_size(self.stage)
        sources = [pipeline.of_stage(source) for source in pipeline.sources(self.stage)]
        targets = [pipeline.of_stage(target) for target in pipeline.targets(self.stage)]
        backward = (Kind.RECV_GRADIENT, targets, Kind.SEND_GRADIENT, sources)
        self.messages: Mapping[Kind, _Messages] = {
            Kind.FORWARD: (Kind.RECV_ACTIVATION, sources, Kind.SEND_ACTIVATION, targets),
            Kind.BACKWARD: backward,
            Kind.BACKWARD_INPUT: backward,
            Kind.BACKWARD_WEIGHT: (Kind.RECV_GRADIENT, [], Kind.SEND_GRADIENT, []),
        }
        reduces = pipeline.reduces(self.stage)
        self.closing = (Kind.ALL_REDUCE, Kind.UPDATE) if reduces else (Kind.UPDATE,)
        self.round = 0
        self.left = self._own()
        self._close_rounds()

    def write(self, step: Step) -> None:
        _, kind, minibatch, version = step
        receive, sources, send, targets = self.messages[kind]
        stage, replica, add = self.stage, self.replica, self.actions.append
        for peers in sources:
            peer = peers[minibatch % len(peers)]
            add(Action(receive, stage, replica, minibatch, version, peer))
        add(Action(kind, stage, replica, minibatch, version))
        for peers in targets:
            peer = peers[minibatch % len(peers)]
            add(Action(send, stage, replica, minibatch, version, peer))
        if kind in ENDS_BACKWARD:
            self.left -= 1
            self._close_rounds()

    def _close_rounds(self) -> None:
        """All-reduce and update for the rounds in which this worker has nothing left to do."""
        while not self.left and (divisor := self.pipeline.in_round(self.stage, self.round)):
            first = self.round * self.round_size
            self.round += 1
            self.left = self._own()
            for kind in self.closing:
                self.actions.append(
                    Action(kind, self.stage, self.replica, first, self.round, None, divisor)
                )

    def _own(self) -> int:
        """How many minibatches of the round run on this worker."""
        first = self.round * self.round_size
        count = self.pipeline.in_round(self.stage, self.round)
        return len(range((self.replica - first) % self.replicas, count, self.replicas))

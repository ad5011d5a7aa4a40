"""The one description of the order of things: what each worker of a pipeline does, and when.

A schedule is made by playing its rules (`policy`) as a balanced pipeline would (`play`) and writing
down the order that comes out. That fits any replica counts, and it cannot deadlock: the play itself
is an order in which everything could be done.

Pure: no torch, no processes. The engine executes `Schedule.actions`, the simulator times them,
`chart` draws the play, `checker` proves it sound; all of them in `pipedream.runtime`.

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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipedream.graph.schedule_name import ScheduleName
from pipedream.runtime.action import Action, Kind, Link, Worker
from pipedream.runtime.pipeline import Pipeline
from pipedream.runtime.play import Play, Step


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


_MESSAGES = {
    Kind.FORWARD: (Kind.RECV_ACTIVATION, Kind.SEND_ACTIVATION),
    Kind.BACKWARD: (Kind.RECV_GRADIENT, Kind.SEND_GRADIENT),
}
"""What comes before a pass and what goes out after it."""


class _Writer:
    """Writes the passes of one worker down with their messages and updates."""

    def __init__(self, pipeline: Pipeline, worker: Worker) -> None:
        self.pipeline = pipeline
        self.stage, self.replica = worker
        self.replicas = pipeline.replicas[self.stage]
        self.round_size = pipeline.round_size(self.stage)
        self.sources = [pipeline.of_stage(source) for source in pipeline.sources(self.stage)]
        self.targets = [pipeline.of_stage(target) for target in pipeline.targets(self.stage)]
        reduces = pipeline.reduces(self.stage)
        self.closing = (Kind.ALL_REDUCE, Kind.UPDATE) if reduces else (Kind.UPDATE,)
        self.round = 0
        self.left = self._own()
        self.actions: list[Action] = []
        self._close_rounds()

    def write(self, step: Step) -> None:
        _, kind, minibatch, version = step
        forward = kind is Kind.FORWARD
        receive, send = _MESSAGES[kind]
        stage, replica, add = self.stage, self.replica, self.actions.append
        for peers in self.sources if forward else self.targets:
            peer = peers[minibatch % len(peers)]
            add(Action(receive, stage, replica, minibatch, version, peer))
        add(Action(kind, stage, replica, minibatch, version))
        for peers in self.targets if forward else self.sources:
            peer = peers[minibatch % len(peers)]
            add(Action(send, stage, replica, minibatch, version, peer))
        if not forward:
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

"""A schedule's rules played as a balanced pipeline would."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from pipedream.runtime.action import Kind, Worker
from pipedream.runtime.pipeline import Pipeline


class Step(NamedTuple):
    """A forward or backward pass in the play: when it begins, and the version of the weights it
    runs on.
    """

    time: int
    kind: Kind
    minibatch: int
    version: int


class Play:
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

"""The list scheduler: the order of passes that a schedule's rules give in a balanced pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from pipedream.schedule.action import Kind, Worker
from pipedream.schedule.policy import Policy
from pipedream.schedule.spec import PipelineSpec


class Step(NamedTuple):
    """A forward or backward pass: when it begins, and the version of the weights it runs on. Or a
    receive that comes before other passes, of a message from stage `source`.
    """

    time: int
    kind: Kind
    minibatch: int
    version: int
    source: int = -1


@dataclass(slots=True)
class _StageProgress:
    """Holds how far a stage is: in a round up to minibatch `end`, of which `left` have yet to go
    backward. `forward_over` and `backward_over`: when the pass of each minibatch is over.
    """

    number: int
    limit: int
    round_size: int
    end: int
    left: int
    forward_over: list[float]
    backward_over: list[float]
    version_of: list[int]
    round: int = 0
    begins: int = 0
    workers: list[_WorkerProgress] = field(default_factory=list)
    before_forward: list[list[float]] = field(default_factory=list)
    """When the passes are over that a forward pass waits for, of the same minibatch elsewhere."""
    before_backward: list[list[float]] = field(default_factory=list)
    after_forward: list[_StageProgress] = field(default_factory=list)
    """Where passes wait for a forward pass of this stage."""
    after_backward: list[_StageProgress] = field(default_factory=list)


@dataclass(slots=True)
class _WorkerProgress:
    """Holds how far a worker is; `number`: its place among all workers."""

    number: int
    worker: Worker
    stage: _StageProgress
    coming: int
    in_flight: deque[int] = field(default_factory=deque)
    busy_until: int = 0


class ListScheduler:
    """A schedule's rules in a balanced pipeline: a pass of a stage of r replicas takes r units.

    A worker runs forward passes until as many minibatches are in flight as the rules allow, then
    backward and forward passes in turn: it prefers to wait for the activations of the next
    minibatch over running a backward pass early, and waiting when all workers could be busy. It
    runs backward passes at once if there is no forward pass to wait for: all minibatches are in, or
    the next one needs the update that these backward passes make. Forward passes are in ascending
    order of the minibatches, backward passes in that order or, round by round, in the opposite one:
    all stages share it, so that the messages between two workers have the same order at both ends.
    Having done its backward passes of a round it waits for the other replicas of its stage.

    Where there is less room than the steady state needs, all may wait for a minibatch that cannot
    come: then the first that can goes backward. So it always ends: a minibatch waits only for
    smaller ones and, within a round of all forward passes first, the backward passes of larger
    ones that wait for nothing but forward passes.

    Whether a worker can begin anything depends on its stage, and on the passes that its next one
    waits for. So it is asked when its own pass is over, when a round of its stage begins and when
    such a pass is over: that is a turn. Turns of the same time are taken in the order of workers.
    """

    def __init__(self, spec: PipelineSpec, policy: Policy, minibatches: int) -> None:
        self.policy, self.minibatches = policy, minibatches
        self.backward_oldest_first, self.version = policy.backward_oldest_first, policy.version
        self.set_by_first = policy.set_by_first
        self.stages = [self._stage(number) for number in range(len(spec.replicas))]
        self.workers: list[_WorkerProgress] = []
        for number, worker in enumerate(spec.workers):
            stage = self.stages[worker[0]]
            progress = _WorkerProgress(number, worker, stage, coming=worker[1])
            stage.workers.append(progress)
            self.workers.append(progress)
        for source, target in spec.links:
            self.stages[source].before_backward.append(self.stages[target].backward_over)
            self.stages[target].after_backward.append(self.stages[source])
        entering = {(0, stage) for stage in range(1, len(self.stages)) if self.set_by_first}
        for source, target in entering.union(spec.links):
            self.stages[target].before_forward.append(self.stages[source].forward_over)
            self.stages[source].after_forward.append(self.stages[target])
        self.turns = [(0, progress.number) for progress in self.workers]

    def _stage(self, number: int) -> _StageProgress:
        policy, minibatches = self.policy, self.minibatches
        return _StageProgress(
            number,
            limit=policy.in_flight(number),
            round_size=policy.round_size(number),
            end=policy.round_size(number),
            left=policy.in_round(number, 0, minibatches),
            forward_over=[inf] * minibatches,
            backward_over=[inf] * minibatches,
            version_of=[0] * minibatches,
        )

    def steps(self) -> Iterator[tuple[Worker, Step]]:
        """Yields the passes in the order of time."""
        left = 2 * self.minibatches * len(self.stages)
        time, stuck = 0, -1
        while left:
            if not self.turns:
                assert time > stuck, f"nobody can move at time {time}"
                self.turns = [(time, progress.number) for progress in self.workers]
                stuck = time
            time, number = heappop(self.turns)
            progress = self.workers[number]
            if progress.busy_until <= time:
                step = self._step(progress, time, patient=time > stuck)
                if step is not None:
                    yield progress.worker, step
                    left -= 1

    def _step(self, progress: _WorkerProgress, time: int, patient: bool) -> Step | None:
        """Returns the pass that the worker begins at `time`, if any."""
        stage, in_flight = progress.stage, progress.in_flight
        oldest = in_flight[0] if in_flight else progress.coming
        if time < stage.begins or oldest >= stage.end:
            return None
        version = self._version(progress)
        if version is not None:
            if _are_over(stage.before_forward, progress.coming, time):
                return self._go_forward(progress, time, version)
            if patient:
                return None
        if not in_flight:
            return None
        if self.backward_oldest_first:
            minibatch = oldest
        elif progress.coming < min(stage.end, self.minibatches):
            return None
        else:
            minibatch = in_flight[-1]
        if _are_over(stage.before_backward, minibatch, time):
            return self._go_backward(progress, time, minibatch)
        return None

    def _version(self, progress: _WorkerProgress) -> int | None:
        """Returns the version of its next forward pass; None if a backward pass comes first."""
        stage, coming = progress.stage, progress.coming
        if coming >= self.minibatches or len(progress.in_flight) >= stage.limit:
            return None
        entered = self.stages[0].version_of[coming]
        version = self.version(stage.number, coming, stage.round, entered)
        return version if version <= stage.round else None

    def _go_forward(self, progress: _WorkerProgress, time: int, version: int) -> Step:
        stage, minibatch = progress.stage, progress.coming
        over = time + len(stage.workers)
        stage.version_of[minibatch] = version
        stage.forward_over[minibatch] = progress.busy_until = over
        progress.coming += len(stage.workers)
        progress.in_flight.append(minibatch)
        heappush(self.turns, (over, progress.number))
        self._wake(stage.after_forward, minibatch, over)
        if self.set_by_first and stage.number == 0:  # what version they will need is known now
            self._wake(stage.after_forward, minibatch, time)
        return Step(time, Kind.FORWARD, minibatch, version)

    def _go_backward(self, progress: _WorkerProgress, time: int, minibatch: int) -> Step:
        stage = progress.stage
        over = time + len(stage.workers)
        stage.backward_over[minibatch] = progress.busy_until = over
        if self.backward_oldest_first:
            progress.in_flight.popleft()
        else:
            progress.in_flight.pop()
        stage.left -= 1
        if stage.left:
            heappush(self.turns, (over, progress.number))
        else:
            self._next_round(stage, over)
        self._wake(stage.after_backward, minibatch, over)
        return Step(time, Kind.BACKWARD, minibatch, stage.version_of[minibatch])

    def _next_round(self, stage: _StageProgress, begins: int) -> None:
        stage.round += 1
        stage.begins = begins
        stage.end += stage.round_size
        stage.left = self.policy.in_round(stage.number, stage.round, self.minibatches)
        for progress in stage.workers:
            heappush(self.turns, (begins, progress.number))

    def _wake(self, stages: Sequence[_StageProgress], minibatch: int, time: int) -> None:
        """Gives the workers that may wait for a pass of `minibatch` a turn."""
        for stage in stages:
            progress = stage.workers[minibatch % len(stage.workers)]
            if progress.busy_until < time:
                heappush(self.turns, (time, progress.number))


def _are_over(passes: Sequence[Sequence[float]], minibatch: int, time: int) -> bool:
    for over in passes:  # noqa: SIM110 - the time that a generator takes is felt
        if over[minibatch] > time:
            return False
    return True

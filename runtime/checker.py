"""Proves a schedule sound by replaying it as workers that know nothing but their own lists.

Sends never block; a receive takes the next message of its channel and blocks until there is one; an
all-reduce blocks until every replica of the stage, or of all tied stages, has come to it. If that
replay comes to its end, no timing of the workers can make it hang: whether an action can go on
depends on what others have done before, never on how fast.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipedream.runtime.schedule import (
    Action,
    Kind,
    Pipeline,
    Schedule,
    Worker,
    show_worker,
    warm_up,
)

_WINDOW = 4


class UnsoundError(Exception):
    """What is wrong with a schedule, and what every worker was about to do."""


@dataclass
class Peak:
    """The most a worker held at once: minibatches in flight, and versions of its weights (those
    that minibatches in flight run on, and the newest).
    """

    in_flight: int = 0
    versions: int = 1


def check(schedule: Schedule) -> dict[Worker, Peak]:
    """Replays `schedule`; what each worker holds at most. Raises UnsoundError."""
    return check_actions(
        schedule, {worker: schedule.actions(worker) for worker in schedule.workers}
    )


def check_actions(
    pipeline: Pipeline, actions: Mapping[Worker, Sequence[Action]]
) -> dict[Worker, Peak]:
    """Like `check`, for lists of actions from anywhere."""
    assert set(actions) == set(pipeline.workers)
    replay = _Replay(pipeline, actions)
    replay.run()
    return {worker: state.peak for worker, state in replay.states.items()}


@dataclass
class _State:
    """Where one worker stands."""

    actions: Sequence[Action]
    position: int = 0
    version: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)
    received: set[tuple[Kind, int, int]] = field(default_factory=set)
    done: Counter[tuple[Kind, int]] = field(default_factory=Counter)
    reduced: Action | None = None
    peak: Peak = field(default_factory=Peak)

    @property
    def next(self) -> Action | None:
        return self.actions[self.position] if self.position < len(self.actions) else None


class _Replay:
    def __init__(self, pipeline: Pipeline, actions: Mapping[Worker, Sequence[Action]]) -> None:
        self.pipeline = pipeline
        self.states = {worker: _State(actions[worker]) for worker in pipeline.workers}
        self.channels: dict[tuple[Worker, Worker, Kind], deque[int]] = {}
        self.perform = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.SEND_ACTIVATION: self._send,
            Kind.SEND_GRADIENT: self._send,
            Kind.RECV_ACTIVATION: self._receive,
            Kind.RECV_GRADIENT: self._receive,
            Kind.ALL_REDUCE: self._all_reduce,
            Kind.UPDATE: self._update,
        }

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for worker, state in self.states.items():
                while self._step(worker, state):
                    moved = True
        for worker, state in self.states.items():
            self._require(state.next is None, worker, "deadlock: waits for ever")
        for worker, state in self.states.items():
            self._finish(worker, state)
        for (source, target, kind), channel in self.channels.items():
            self._require(not channel, source, f"{kind} to {show_worker(target)} never received")

    def _step(self, worker: Worker, state: _State) -> bool:
        """Lets `worker` do its next action; False if it has to wait, or has come to its end."""
        action = state.next
        if action is None:
            return False
        owner = (action.stage, action.replica)
        self._require(owner == worker, worker, "an action of another worker")
        if not self.perform[action.kind](worker, state, action):
            return False
        state.peak.in_flight = max(state.peak.in_flight, len(state.in_flight))
        state.peak.versions = max(
            state.peak.versions, len({state.version, *state.in_flight.values()})
        )
        limit = warm_up(self.pipeline.replicas, worker[0])
        self._require(state.peak.in_flight <= limit, worker, f"more than {limit} in flight")
        self._require(state.peak.versions <= limit, worker, f"more than {limit} versions alive")
        state.done[action.kind, action.minibatch] += 1
        state.position += 1
        return True

    def _forward(self, worker: Worker, state: _State, action: Action) -> bool:
        stage, minibatch = worker[0], action.minibatch
        self._require(
            minibatch < self.pipeline.minibatches
            and self.pipeline.replica(stage, minibatch) == worker[1],
            worker,
            "a minibatch of another replica",
        )
        self._require(not state.done[Kind.FORWARD, minibatch], worker, "forward twice")
        self._require(
            action.version == state.version, worker, f"{state.version} updates stand before it"
        )
        if self.pipeline.name == "flush":
            expected = minibatch // self.pipeline.microbatches
            self._require(action.version == expected, worker, f"flush wants version {expected}")
        self._take(worker, state, Kind.RECV_ACTIVATION, self.pipeline.sources(stage), minibatch)
        state.in_flight[minibatch] = action.version
        return True

    def _backward(self, worker: Worker, state: _State, action: Action) -> bool:
        stage, minibatch = worker[0], action.minibatch
        version = state.in_flight.pop(minibatch, None)
        self._require(version is not None, worker, "backward without a forward")
        self._require(action.version == version, worker, f"forward ran on version {version}")
        round_ = minibatch // self.pipeline.round_size(stage)
        self._require(round_ == state.version, worker, "its round is over, or not yet begun")
        self._take(worker, state, Kind.RECV_GRADIENT, self.pipeline.targets(stage), minibatch)
        return True

    def _take(
        self, worker: Worker, state: _State, kind: Kind, stages: Sequence[int], minibatch: int
    ) -> None:
        """Uses up the messages that the pass of `minibatch` needs."""
        for stage in stages:
            message = (kind, minibatch, stage)
            self._require(message in state.received, worker, f"{kind} from {stage} is missing")
            state.received.remove(message)

    def _send(self, worker: Worker, state: _State, action: Action) -> bool:
        peer = self._peer(worker, action)
        forwards = action.kind is Kind.SEND_ACTIVATION
        made_by = Kind.FORWARD if forwards else Kind.BACKWARD
        self._require(
            bool(state.done[made_by, action.minibatch]), worker, "sends what is not made yet"
        )
        taken_by = Kind.RECV_ACTIVATION if forwards else Kind.RECV_GRADIENT
        self.channels.setdefault((worker, peer, taken_by), deque()).append(action.minibatch)
        return True

    def _receive(self, worker: Worker, state: _State, action: Action) -> bool:
        peer = self._peer(worker, action)
        channel = self.channels.get((peer, worker, action.kind))
        if not channel:
            return False
        minibatch = channel.popleft()
        self._require(minibatch == action.minibatch, worker, f"minibatch {minibatch} comes first")
        state.received.add((action.kind, minibatch, peer[0]))
        return True

    def _peer(self, worker: Worker, action: Action) -> Worker:
        """The other end of a message, when there is a link that it can take."""
        peer = action.peer
        self._require(peer is not None, worker, "a message without a peer")
        assert peer is not None
        outwards = action.kind in (Kind.SEND_ACTIVATION, Kind.RECV_GRADIENT)
        link = (worker[0], peer[0]) if outwards else (peer[0], worker[0])
        self._require(link in self.pipeline.links, worker, f"there is no link {link}")
        self._require(
            self.pipeline.replica(peer[0], action.minibatch) == peer[1], worker, "not its replica"
        )
        return peer

    def _all_reduce(self, worker: Worker, state: _State, action: Action) -> bool:
        """Opens when the last replica comes; `reduced` lets the ones that waited pass."""
        self._check_round(worker, state, action)
        self._require(not state.done[action.kind, action.minibatch], worker, "all-reduce twice")
        if state.reduced == action:
            return True
        tied = self.pipeline.tied
        stages = tied if worker[0] in tied else (worker[0],)
        peers = [state for other, state in self.states.items() if other[0] in stages]
        for peer in peers:
            waiting = peer.next
            if waiting is None or waiting.kind is not Kind.ALL_REDUCE or peer.reduced == waiting:
                return False
        for peer in peers:
            peer.reduced = peer.next
        return True

    def _update(self, worker: Worker, state: _State, action: Action) -> bool:
        self._check_round(worker, state, action)
        if self.pipeline.replicas[worker[0]] > 1 or worker[0] in self.pipeline.tied:
            reduced = action._replace(kind=Kind.ALL_REDUCE)
            self._require(state.reduced == reduced, worker, "update before its all-reduce")
        state.version += 1
        return True

    def _check_round(self, worker: Worker, state: _State, action: Action) -> None:
        """Whether `action` closes the current round, and this worker has done its part of it."""
        stage, replica = worker
        first = state.version * self.pipeline.round_size(stage)
        size = self.pipeline.in_round(stage, state.version)
        expected = (first, size, state.version + 1)
        found = (action.minibatch, action.divisor, action.version)
        self._require(found == expected, worker, f"expected {expected}, found {found}")
        for minibatch in range(first, first + size):
            if self.pipeline.replica(stage, minibatch) == replica:
                done = bool(state.done[Kind.BACKWARD, minibatch])
                self._require(done, worker, f"minibatch {minibatch} has not gone backward")

    def _finish(self, worker: Worker, state: _State) -> None:
        stage, replica = worker
        for minibatch in range(replica, self.pipeline.minibatches, self.pipeline.replicas[stage]):
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                times = state.done[kind, minibatch]
                self._require(times == 1, worker, f"{kind}{minibatch} stands {times} times")
        left = self.pipeline.in_round(stage, state.version)
        self._require(not left, worker, f"no update for the last {left} minibatches")
        self._require(not state.received, worker, f"never used: {state.received}")

    def _require(self, holds: bool, worker: Worker, problem: str) -> None:
        if not holds:
            action = self.states[worker].next
            at = "at the end" if action is None else f"at {action}"
            raise UnsoundError(f"worker {show_worker(worker)} {at}: {problem}\n{self._show()}")

    def _show(self) -> str:
        """The last few actions of each worker, a bar, and its next few."""
        lines = []
        for worker, state in self.states.items():
            here = state.position
            past = " ".join(map(str, state.actions[max(0, here - _WINDOW) : here]))
            coming = " ".join(map(str, state.actions[here : here + _WINDOW]))
            lines.append(f"  {show_worker(worker):6}{past} | {coming}")
        return "\n".join(lines)

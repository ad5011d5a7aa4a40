"""Proves a schedule sound by replaying it as workers that know nothing but their own lists.

Sends never block; a receive takes the next message of its channel and blocks until there is one; an
all-reduce blocks until every replica of the stage, or of all tied stages, has come to it. If that
replay comes to its end, no timing of the workers can make it hang: whether an action can go on
depends on what others have done before, never on how fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipedream.runtime.action import Action, Kind, Worker, show_worker
from pipedream.runtime.pipeline import Pipeline
from pipedream.runtime.policy import Peak
from pipedream.runtime.schedule import Schedule
from pipedream.runtime.versions import Versions

_WINDOW = 4


class UnsoundError(Exception):
    """What is wrong with a schedule, and what every worker was about to do."""


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
    return {worker: Peak(*state.peak) for worker, state in replay.states.items()}


@dataclass
class _State:
    """Where one worker stands; `received`: the messages not yet used, `waits`: for what others have
    not done since, `peak`: the most minibatches in flight, and versions.
    """

    actions: Sequence[Action]
    versions: Versions
    position: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)
    forward: set[int] = field(default_factory=set)
    backward: set[int] = field(default_factory=set)
    received: set[tuple[Kind, int, int]] = field(default_factory=set)
    reduced: Action | None = None
    waits: bool = False
    peak: list[int] = field(default_factory=lambda: [0, 1])

    @property
    def next(self) -> Action | None:
        return self.actions[self.position] if self.position < len(self.actions) else None


class _Replay:
    """Each method that performs an action tells whether it could; if not the worker has to wait."""

    def __init__(self, pipeline: Pipeline, actions: Mapping[Worker, Sequence[Action]]) -> None:
        policy, stages = pipeline.policy, range(len(pipeline.replicas))
        self.pipeline = pipeline
        self.policy = policy
        self.links = frozenset(pipeline.links)
        self.sources = [pipeline.sources(stage) for stage in stages]
        self.targets = [pipeline.targets(stage) for stage in stages]
        self.bounds = [policy.peak(stage) for stage in stages]
        self.states = {
            worker: _State(listed, Versions(listed)) for worker, listed in actions.items()
        }
        # The version on which each minibatch enters the pipeline.
        self.entered = {
            action.minibatch: action.version
            for worker in pipeline.workers
            if worker[0] == 0
            for action in actions[worker]
            if action.kind is Kind.FORWARD
        }
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
                if not state.waits:
                    begin = state.position
                    self._go_on(worker, state)
                    moved |= state.position > begin
        for worker, state in self.states.items():
            if state.next is not None:
                raise self._unsound(worker, "deadlock: waits for ever")
        for worker, state in self.states.items():
            self._finish(worker, state)
        for (source, target, kind), channel in self.channels.items():
            if channel:
                raise self._unsound(source, f"{kind} to {show_worker(target)} never received")

    def _go_on(self, worker: Worker, state: _State) -> None:
        """Lets `worker` do its actions until it has to wait, or has come to its end."""
        actions, perform = state.actions, self.perform
        for position in range(state.position, len(actions)):
            action = actions[position]
            if (action.stage, action.replica) != worker:
                raise self._unsound(worker, "an action of another worker")
            if not perform[action.kind](worker, state, action):
                state.waits = True
                return
            state.position += 1

    def _forward(self, worker: Worker, state: _State, action: Action) -> bool:
        stage, minibatch, version = worker[0], action.minibatch, action.version
        pipeline = self.pipeline
        if minibatch >= pipeline.minibatches or minibatch % pipeline.replicas[stage] != worker[1]:
            raise self._unsound(worker, "a minibatch of another replica")
        if minibatch in state.forward:
            raise self._unsound(worker, "forward twice")
        entered = self.entered.get(minibatch, 0)
        newest = state.versions.newest
        expected = self.policy.version(stage, minibatch, newest, entered)
        if version != expected:
            raise self._unsound(worker, f"{pipeline.name} wants version {expected}")
        if version > newest:
            raise self._unsound(worker, f"{newest} updates stand before it")
        self._take(worker, state, Kind.RECV_ACTIVATION, self.sources[stage], minibatch)
        state.forward.add(minibatch)
        state.in_flight[minibatch] = version
        self._keep_within(worker, state)
        return True

    def _backward(self, worker: Worker, state: _State, action: Action) -> bool:
        stage, minibatch = worker[0], action.minibatch
        version = state.in_flight.pop(minibatch, None)
        if version is None:
            raise self._unsound(worker, "backward without a forward")
        if action.version != version:
            raise self._unsound(worker, f"forward ran on version {version}")
        if minibatch // self.policy.round_size(stage) != state.versions.newest:
            raise self._unsound(worker, "its round is over, or not yet begun")
        self._take(worker, state, Kind.RECV_GRADIENT, self.targets[stage], minibatch)
        state.backward.add(minibatch)
        state.versions.gone_backward(version)
        return True

    def _keep_within(self, worker: Worker, state: _State) -> None:
        """Takes note of what the worker holds, after an action that made it more."""
        bound = self.bounds[worker[0]]
        peak = state.peak[:] = (
            max(state.peak[0], len(state.in_flight)),
            max(state.peak[1], len(state.versions.alive)),
        )
        if peak[0] > bound.in_flight:
            raise self._unsound(worker, f"more than {bound.in_flight} in flight")
        if peak[1] > bound.versions:
            raise self._unsound(worker, f"more than {bound.versions} versions alive")

    def _take(
        self, worker: Worker, state: _State, kind: Kind, stages: Sequence[int], minibatch: int
    ) -> None:
        """Uses up the messages that the pass of `minibatch` needs."""
        for stage in stages:
            message = (kind, minibatch, stage)
            if message not in state.received:
                raise self._unsound(worker, f"{kind} from {stage} is missing")
            state.received.remove(message)

    def _send(self, worker: Worker, state: _State, action: Action) -> bool:
        peer = self._peer(worker, action)
        forwards = action.kind is Kind.SEND_ACTIVATION
        if action.minibatch not in (state.forward if forwards else state.backward):
            raise self._unsound(worker, "sends what is not made yet")
        taken_by = Kind.RECV_ACTIVATION if forwards else Kind.RECV_GRADIENT
        channel = self.channels.get((worker, peer, taken_by))
        if channel is None:
            channel = self.channels[worker, peer, taken_by] = deque()
        channel.append(action.minibatch)
        self.states[peer].waits = False
        return True

    def _receive(self, worker: Worker, state: _State, action: Action) -> bool:
        peer = self._peer(worker, action)
        channel = self.channels.get((peer, worker, action.kind))
        if not channel:
            return False
        minibatch = channel.popleft()
        if minibatch != action.minibatch:
            raise self._unsound(worker, f"minibatch {minibatch} comes first")
        state.received.add((action.kind, minibatch, peer[0]))
        return True

    def _peer(self, worker: Worker, action: Action) -> Worker:
        """The other end of a message, when there is a link that it can take."""
        peer = action.peer
        if peer is None:
            raise self._unsound(worker, "a message without a peer")
        outwards = action.kind is Kind.SEND_ACTIVATION or action.kind is Kind.RECV_GRADIENT
        link = (worker[0], peer[0]) if outwards else (peer[0], worker[0])
        if link not in self.links:
            raise self._unsound(worker, f"there is no link {link}")
        if action.minibatch % self.pipeline.replicas[peer[0]] != peer[1]:
            raise self._unsound(worker, "not its replica")
        return peer

    def _all_reduce(self, worker: Worker, state: _State, action: Action) -> bool:
        """Opens when the last replica comes; `reduced` lets the ones that waited pass."""
        self._check_round(worker, state, action)
        if state.reduced == action:
            if state.actions[state.position - 1] == action:
                raise self._unsound(worker, "all-reduce twice")
            return True
        tied = self.pipeline.tied
        stages = tied if worker[0] in tied else (worker[0],)
        peers = [self.states[s, r] for s in stages for r in range(self.pipeline.replicas[s])]
        for peer in peers:
            waiting = peer.next
            if waiting is None or waiting.kind is not Kind.ALL_REDUCE or peer.reduced == waiting:
                return False
        for peer in peers:
            peer.reduced, peer.waits = peer.next, False
        return True

    def _update(self, worker: Worker, state: _State, action: Action) -> bool:
        self._check_round(worker, state, action)
        reduced = action._replace(kind=Kind.ALL_REDUCE)
        if self.pipeline.reduces(worker[0]) and state.reduced != reduced:
            raise self._unsound(worker, "update before its all-reduce")
        state.versions.updated()
        self._keep_within(worker, state)
        return True

    def _check_round(self, worker: Worker, state: _State, action: Action) -> None:
        """Whether `action` closes the current round, and this worker has done its part of it."""
        stage, replica = worker
        newest = state.versions.newest
        first = newest * self.policy.round_size(stage)
        size = self.pipeline.in_round(stage, newest)
        expected = (first, size, newest + 1)
        found = (action.minibatch, action.divisor, action.version)
        if found != expected:
            raise self._unsound(worker, f"expected {expected}, found {found}")
        step = self.pipeline.replicas[stage]
        for minibatch in range(first + (replica - first) % step, first + size, step):
            if minibatch not in state.backward:
                raise self._unsound(worker, f"minibatch {minibatch} has not gone backward")

    def _finish(self, worker: Worker, state: _State) -> None:
        stage, replica = worker
        own = set(range(replica, self.pipeline.minibatches, self.pipeline.replicas[stage]))
        for kind, done in ((Kind.FORWARD, state.forward), (Kind.BACKWARD, state.backward)):
            if done != own:
                missing = ", ".join(f"{kind}{minibatch}" for minibatch in sorted(own - done))
                raise self._unsound(worker, f"{missing} missing")
        left = self.pipeline.in_round(stage, state.versions.newest)
        if left:
            raise self._unsound(worker, f"no update for the last {left} minibatches")
        if state.received:
            raise self._unsound(worker, f"never used: {state.received}")

    def _unsound(self, worker: Worker, problem: str) -> UnsoundError:
        action = self.states[worker].next
        at = "at the end" if action is None else f"at {action}"
        return UnsoundError(f"worker {show_worker(worker)} {at}: {problem}\n{self._show()}")

    def _show(self) -> str:
        """The last few actions of each worker, a bar, and its next few."""
        lines = []
        for worker, state in self.states.items():
            here = state.position
            past = " ".join(map(str, state.actions[max(0, here - _WINDOW) : here]))
            coming = " ".join(map(str, state.actions[here : here + _WINDOW]))
            lines.append(f"  {show_worker(worker):6}{past} | {coming}")
        return "\n".join(lines)

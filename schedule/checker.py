"""Proves a schedule sound by replaying it as ranks that know nothing but their own lists.

A rank does the actions of one worker or, where it has several stages, of several. Sends never
block; a receive takes the next message that its rank has from the other one and blocks until there
is one; an all-reduce blocks until every replica of the stage has come to it, and that of the last
tied stage of a rank until all tied stages have; the last norm of a round on a rank blocks until all
workers have come to theirs. If that replay comes to its end, no timing of the ranks can make it
hang: whether an action can go on depends on what others have done before, never on how fast.

Activations from one rank to another are received in the order in which they were sent, whichever
stages they are between, and gradients likewise: NCCL has no other way to tell them apart. Between
two stages of the same rank only the messages of one link have an order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipedream.graph.plan import RankAssignment, workers_by_rank
from pipedream.schedule.action import Action, Kind, Versions, Worker, show_worker
from pipedream.schedule.operations import disorder
from pipedream.schedule.policy import Peak
from pipedream.schedule.schedule import Schedule

_WINDOW = 4


class UnsoundError(Exception):
    """Says what is wrong with a schedule, and what every rank was about to do."""


def check(schedule: Schedule) -> dict[Worker, Peak]:
    """Replays `schedule`; returns the most that each worker holds. Raises UnsoundError."""
    return check_actions(
        schedule, {worker: schedule.actions(worker) for worker in schedule.workers}
    )


def check_actions(
    schedule: Schedule, actions: Mapping[Worker, Sequence[Action]]
) -> dict[Worker, Peak]:
    """Does what `check` does, for lists of actions from anywhere, one for each worker."""
    assert set(actions) == set(schedule.workers)
    return _replayed(schedule, {(worker,): listed for worker, listed in actions.items()})


def check_ranks(
    schedule: Schedule, actions: Mapping[int, Sequence[Action]], assignment: RankAssignment
) -> dict[Worker, Peak]:
    """Does what `check` does, for the lists of ranks, which may have several workers each; and
    proves that ranks begin what they do together in one order (`operations`).
    """
    workers = workers_by_rank(assignment)
    peaks = _replayed(schedule, {tuple(workers[rank]): each for rank, each in actions.items()})
    problem = disorder(actions, assignment, schedule.spec.tied)
    if problem is not None:
        raise UnsoundError(problem)
    return peaks


def _replayed(
    schedule: Schedule, actions: Mapping[tuple[Worker, ...], Sequence[Action]]
) -> dict[Worker, Peak]:
    replay = _Replay(schedule, actions)
    replay.run()
    return {worker: Peak(*state.peak) for worker, state in replay.states.items()}


@dataclass
class _RankReplay:
    """Holds how far a rank is in its list; `waits`: for others, which have done nothing since."""

    workers: tuple[Worker, ...]
    actions: Sequence[Action]
    position: int = 0
    waits: bool = False

    @property
    def next(self) -> Action | None:
        return self.actions[self.position] if self.position < len(self.actions) else None

    def of(self, worker: Worker) -> Sequence[Action]:
        """Returns the actions of one of its workers."""
        if len(self.workers) == 1:
            return self.actions
        return [action for action in self.actions if (action.stage, action.replica) == worker]


@dataclass
class _WorkerReplay:
    """Holds what one worker has. `received`: messages not yet used; `halfway`: minibatches between
    the halves of their backward pass; `returned`: those whose gradients may be sent. `summed`: the
    all-reduce that it has done. `normed`: how many rounds it has handed in for their norm. `peak`:
    the most minibatches in flight, and versions.
    """

    worker: Worker
    rank: _RankReplay
    versions: Versions
    in_flight: dict[int, int] = field(default_factory=dict)
    forward: set[int] = field(default_factory=set)
    halfway: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)
    backward: set[int] = field(default_factory=set)
    received: set[tuple[Kind, int, int]] = field(default_factory=set)
    summed: Action | None = None
    normed: int = 0
    peak: list[int] = field(default_factory=lambda: [0, 1])


class _Message(NamedTuple):
    minibatch: int
    source: Worker
    target: Worker


class _Replay:
    """Methods that perform an action return False if the rank has to wait."""

    def __init__(
        self, schedule: Schedule, actions: Mapping[tuple[Worker, ...], Sequence[Action]]
    ) -> None:
        spec, policy = schedule.spec, schedule.policy
        stages = range(len(spec.replicas))
        self.schedule, self.spec, self.policy = schedule, spec, policy
        self.links = frozenset(spec.links)
        self.sources = [spec.sources(stage) for stage in stages]
        self.targets = [spec.targets(stage) for stage in stages]
        self.bounds = [policy.peak(stage) for stage in stages]
        self.ranks = [_RankReplay(workers, listed) for workers, listed in actions.items()]
        self.states = {
            worker: _WorkerReplay(worker, rank, Versions(rank.of(worker)))
            for rank in self.ranks
            for worker in rank.workers
        }
        # The version on which each minibatch enters the pipeline.
        self.entered = {
            action.minibatch: action.version
            for rank in self.ranks
            if any(stage == 0 for stage, _ in rank.workers)
            for action in rank.actions
            if action.kind is Kind.FORWARD and action.stage == 0
        }
        # On their way, by who sends what to whom; the same queue for all that has one order.
        self.queues: dict[tuple[Worker, Worker, Kind], deque[_Message]] = {}
        self.between: dict[tuple[int | Worker, int | Worker, Kind], deque[_Message]] = {}
        # By version, the workers that have come to the norm of the update that makes it; to its
        # all-reduce, by stage, and those of tied stages.
        self.norms: dict[int, set[Worker]] = {}
        self.sums: dict[tuple[int, int], set[Worker]] = {}
        self.tied_sums: dict[int, set[Worker]] = {}
        self.tied = {worker for stage in spec.tied for worker in spec.of_stage(stage)}
        self.perform = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_ACTIVATION: self._send,
            Kind.SEND_GRADIENT: self._send,
            Kind.RECV_ACTIVATION: self._receive,
            Kind.RECV_GRADIENT: self._receive,
            Kind.ALL_REDUCE: self._all_reduce,
            Kind.NORM: self._norm,
            Kind.UPDATE: self._update,
        }

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                if not rank.waits:
                    begin = rank.position
                    self._go_on(rank)
                    moved |= rank.position > begin
        for rank in self.ranks:
            if (waiting := rank.next) is not None:
                state = self.states[waiting.stage, waiting.replica]
                raise self._unsound(state, "deadlock: waits for ever")
        for state in self.states.values():
            self._finish(state)
        for (_, _, kind), queue in self.between.items():
            for message in queue:
                to = show_worker(message.target)
                raise self._unsound(self.states[message.source], f"{kind} to {to} never received")

    def _go_on(self, rank: _RankReplay) -> None:
        """Performs actions of `rank` until it has to wait, or has come to its end."""
        actions, perform, states = rank.actions, self.perform, self.states
        for position in range(rank.position, len(actions)):
            action = actions[position]
            worker = action.stage, action.replica
            if worker not in rank.workers:
                raise self._unsound(states[rank.workers[0]], "an action of another worker")
            if not perform[action.kind](states[worker], action):
                rank.waits = True
                return
            rank.position += 1

    def _forward(self, state: _WorkerReplay, action: Action) -> bool:
        (stage, replica), spec = state.worker, self.spec
        minibatch, version = action.minibatch, action.version
        if minibatch >= self.schedule.minibatches or minibatch % spec.replicas[stage] != replica:
            raise self._unsound(state, "a minibatch of another replica")
        if minibatch in state.forward:
            raise self._unsound(state, "forward twice")
        entered = self.entered.get(minibatch, 0)
        newest = state.versions.newest
        expected = self.policy.version(stage, minibatch, newest, entered)
        if version != expected:
            raise self._unsound(state, f"{spec.name} wants version {expected}")
        if state.normed == version > newest:
            raise self._unsound(state, "its update waits for the norm of other stages of the rank")
        if version > newest:
            raise self._unsound(state, f"{newest} updates stand before it")
        self._take(state, Kind.RECV_ACTIVATION, self.sources[stage], minibatch)
        state.forward.add(minibatch)
        state.in_flight[minibatch] = version
        self._keep_within(state)
        return True

    def _backward(self, state: _WorkerReplay, action: Action) -> bool:
        self._backward_input(state, action)
        return self._backward_weight(state, action)

    def _backward_input(self, state: _WorkerReplay, action: Action) -> bool:
        """Replays the first half of a backward pass. It may come before its round begins: the
        gradients of weights that change then do not.
        """
        minibatch = action.minibatch
        self._check_version(state, action)
        if minibatch in state.halfway:
            raise self._unsound(state, "has begun its backward pass before")
        self._take(state, Kind.RECV_GRADIENT, self.targets[state.worker[0]], minibatch)
        state.halfway.add(minibatch)
        state.returned.add(minibatch)
        return True

    def _backward_weight(self, state: _WorkerReplay, action: Action) -> bool:
        minibatch = action.minibatch
        self._check_version(state, action)
        if minibatch not in state.halfway:
            raise self._unsound(state, "the second half without the first")
        now = max(state.versions.newest, state.normed)
        if minibatch // self.policy.round_size(state.worker[0]) != now:
            raise self._unsound(state, "its round is over, or not yet begun")
        state.halfway.remove(minibatch)
        state.backward.add(minibatch)
        state.versions.gone_backward(state.in_flight.pop(minibatch))
        return True

    def _check_version(self, state: _WorkerReplay, action: Action) -> None:
        version = state.in_flight.get(action.minibatch)
        if version is None:
            raise self._unsound(state, "backward without a forward")
        if action.version != version:
            raise self._unsound(state, f"forward ran on version {version}")

    def _keep_within(self, state: _WorkerReplay) -> None:
        """Records what the worker holds after an action that increased it; checks the bound."""
        bound = self.bounds[state.worker[0]]
        peak = state.peak[:] = (
            max(state.peak[0], len(state.in_flight)),
            max(state.peak[1], len(state.versions.alive)),
        )
        if peak[0] > bound.in_flight:
            raise self._unsound(state, f"more than {bound.in_flight} in flight")
        if peak[1] > bound.versions:
            raise self._unsound(state, f"more than {bound.versions} versions alive")

    def _take(
        self, state: _WorkerReplay, kind: Kind, stages: Sequence[int], minibatch: int
    ) -> None:
        """Uses up the messages that the pass of `minibatch` needs."""
        for stage in stages:
            message = (kind, minibatch, stage)
            if message not in state.received:
                raise self._unsound(state, f"{kind} from {stage} is missing")
            state.received.remove(message)

    def _send(self, state: _WorkerReplay, action: Action) -> bool:
        worker, peer = state.worker, self._peer(state, action)
        forwards = action.kind is Kind.SEND_ACTIVATION
        if action.minibatch not in (state.forward if forwards else state.returned):
            raise self._unsound(state, "sends what is not made yet")
        taken_by = Kind.RECV_ACTIVATION if forwards else Kind.RECV_GRADIENT
        message = _Message(action.minibatch, worker, peer)
        self._queue(worker, peer, taken_by).append(message)
        self.states[peer].rank.waits = False
        return True

    def _receive(self, state: _WorkerReplay, action: Action) -> bool:
        worker, peer = state.worker, self._peer(state, action)
        queue = self._queue(peer, worker, action.kind)
        if not queue:
            return False
        minibatch, source, target = queue.popleft()
        if (source, target) != (peer, worker):
            way = f"from {show_worker(source)} to {show_worker(target)}"
            raise self._unsound(state, f"minibatch {minibatch} {way} comes first")
        if minibatch != action.minibatch:
            raise self._unsound(state, f"minibatch {minibatch} comes first")
        state.received.add((action.kind, minibatch, peer[0]))
        return True

    def _queue(self, source: Worker, target: Worker, kind: Kind) -> deque[_Message]:
        """Returns the messages on their way, in the order that they have at both ends."""
        queue = self.queues.get((source, target, kind))
        if queue is None:
            here, there = (self.states[worker].rank.workers[0] for worker in (source, target))
            key = (source, target, kind) if here == there else (here, there, kind)
            queue = self.queues[source, target, kind] = self.between.setdefault(key, deque())
        return queue

    def _peer(self, state: _WorkerReplay, action: Action) -> Worker:
        """Returns the other end of a message. Raises UnsoundError if there is no link to it."""
        peer = action.peer
        if peer is None:
            raise self._unsound(state, "a message without a peer")
        outwards = action.kind is Kind.SEND_ACTIVATION or action.kind is Kind.RECV_GRADIENT
        here = state.worker[0]
        link = (here, peer[0]) if outwards else (peer[0], here)
        if link not in self.links:
            raise self._unsound(state, f"there is no link {link}")
        if action.minibatch % self.spec.replicas[peer[0]] != peer[1]:
            raise self._unsound(state, "not its replica")
        return peer

    def _all_reduce(self, state: _WorkerReplay, action: Action) -> bool:
        """A tied stage adds up what it alone holds with its replicas, then the rest with all tied
        stages: a rank waits for these when it comes to the last of its own.
        """
        worker, replicas = state.worker, self.spec.replicas[state.worker[0]]
        self._check_round(state, action)
        if state.summed == action:
            raise self._unsound(state, "all-reduce twice")
        come = self.sums.setdefault((worker[0], action.version), set())
        self._come(worker, come, replicas)
        if len(come) < replicas:
            return False
        if worker in self.tied:
            come = self.tied_sums.setdefault(action.version, set())
            self._come(worker, come, len(self.tied))
            if len(come) < len(self.tied) and come.issuperset(self.tied & {*state.rank.workers}):
                return False
        state.summed = action
        return True

    def _come(self, worker: Worker, come: set[Worker], expected: int) -> None:
        """Notes that `worker` is where it meets others; with the last of them all go on."""
        if worker not in come:
            come.add(worker)
            if len(come) == expected:
                for rank in self.ranks:
                    rank.waits = False

    def _norm(self, state: _WorkerReplay, action: Action) -> bool:
        """A rank waits at the last norm of its workers in a round, until all workers have come."""
        self._check_round(state, action)
        self._check_reduced(state, action)
        if not self.spec.joint_norm:
            raise self._unsound(state, "a norm that nobody asks for")
        if state.normed == action.version:
            raise self._unsound(state, "norm twice")
        come = self.norms.setdefault(action.version, set())
        self._come(state.worker, come, len(self.states))
        if len(come) < len(self.states) and come.issuperset(state.rank.workers):
            return False
        state.normed = action.version
        return True

    def _update(self, state: _WorkerReplay, action: Action) -> bool:
        self._check_round(state, action)
        self._check_reduced(state, action)
        come = self.norms.get(action.version, ())
        if self.spec.joint_norm and len(come) < len(self.states):
            raise self._unsound(state, "update before its norm")
        state.versions.updated()
        self._keep_within(state)
        return True

    def _check_reduced(self, state: _WorkerReplay, action: Action) -> None:
        """Checks that the gradients that `action` uses are those of all replicas."""
        summed = state.summed == action._replace(kind=Kind.ALL_REDUCE)
        if state.worker in self.tied:
            summed = summed and len(self.tied_sums[action.version]) == len(self.tied)
        if self.spec.reduces(state.worker[0]) and not summed:
            what = "norm" if action.kind is Kind.NORM else "update"
            raise self._unsound(state, f"{what} before its all-reduce")

    def _check_round(self, state: _WorkerReplay, action: Action) -> None:
        """Checks that `action` closes the current round, and that this worker has done its part."""
        stage, replica = state.worker
        newest = state.versions.newest
        first = newest * self.policy.round_size(stage)
        size = self.schedule.in_round(stage, newest)
        expected = (first, size, newest + 1)
        actual = (action.minibatch, action.divisor, action.version)
        if actual != expected:
            raise self._unsound(state, f"expected {expected}, found {actual}")
        step = self.spec.replicas[stage]
        for minibatch in range(first + (replica - first) % step, first + size, step):
            if minibatch not in state.backward:
                raise self._unsound(state, f"minibatch {minibatch} has not had its backward pass")

    def _finish(self, state: _WorkerReplay) -> None:
        stage, replica = state.worker
        minibatches = set(range(replica, self.schedule.minibatches, self.spec.replicas[stage]))
        for kind, done in ((Kind.FORWARD, state.forward), (Kind.BACKWARD, state.backward)):
            if done != minibatches:
                missing = ", ".join(
                    f"{kind}{minibatch}" for minibatch in sorted(minibatches - done)
                )
                raise self._unsound(state, f"{missing} missing")
        left = self.schedule.in_round(stage, state.versions.newest)
        if left:
            raise self._unsound(state, f"no update for the last {left} minibatches")
        if state.received:
            raise self._unsound(state, f"never used: {state.received}")

    def _unsound(self, state: _WorkerReplay, problem: str) -> UnsoundError:
        action = state.rank.next
        at = "at the end" if action is None else f"at {action}"
        return UnsoundError(f"worker {show_worker(state.worker)} {at}: {problem}\n{self._show()}")

    def _show(self) -> str:
        """Returns the last few actions of each rank, a bar, and its next few."""
        lines = []
        for rank in self.ranks:
            here = rank.position
            past = " ".join(map(str, rank.actions[max(0, here - _WINDOW) : here]))
            coming = " ".join(map(str, rank.actions[here : here + _WINDOW]))
            lines.append(f"  {','.join(map(show_worker, rank.workers)):6}{past} | {coming}")
        return "\n".join(lines)

"""Simulates the schedule that pd-train executes, action by action, on a cluster.

Each rank performs its list of actions in order, as the engine does. Passes and updates take their
time; a send takes none of the rank's; a receive waits for the message; an all-reduce waits for all
replicas of the stage and then for the network. Messages that share a link queue; a rank's messages
to itself take no time. Each half of a split backward pass takes half its time.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipedream.graph.choices import DEFAULT_ORDER, MICROBATCHES
from pipedream.graph.cluster import Cluster
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan
from pipedream.graph.profile import TrainingOverheads
from pipedream.graph.timeline import Event, Timeline
from pipedream.optimizer.cost.network import Network
from pipedream.optimizer.simulate.long_rounds import lengthened, rounds_to_play
from pipedream.optimizer.simulate.workload import UPDATE_RATE, Simulation, Workload
from pipedream.schedule.action import Action, Kind, Versions, Worker
from pipedream.schedule.policy import policy
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PipelineSpec
from pipedream.schedule.steady_state import SteadySpan, bubble, steady_window

MOST_MOVES = 2_000_000
"""Workers times minibatches of the largest simulation: about five seconds."""

QUICK_MOVES = 100_000
"""The same for a simulation that is not asked for: about a quarter of a second."""


def simulate_plan(
    plan: Plan,
    graph: Graph,
    update_rate: float = UPDATE_RATE,
    overheads: TrainingOverheads | None = None,
    most_moves: int = MOST_MOVES,
) -> Simulation | None:
    """Simulates `plan` with the times of `graph`; None if that takes more than `most_moves`.

    Rounds have as many microbatches as the plan was made for. Very long rounds of flush are
    extrapolated from shorter ones (long_rounds.py).
    """
    microbatches = plan.predicted.microbatches or MICROBATCHES
    spec = PipelineSpec(
        plan.schedule,
        plan.replicas,
        microbatches=microbatches,
        max_in_flight=plan.max_in_flight,
        order=plan.order or DEFAULT_ORDER,
    )
    rules = policy(spec)
    workload = Workload.of(plan, rules, graph, update_rate, overheads)
    ranks = [stage.ranks for stage in plan.stages]
    spec = replace(spec, links=tuple(sorted(workload.forward_bytes)))
    span = SteadySpan.for_simulation(rules)
    repeats = plan.schedule == "flush" and spec.order == DEFAULT_ORDER
    long = repeats and span.minibatches * plan.workers > QUICK_MOVES
    for length in rounds_to_play(plan.replicas, microbatches) if long else [microbatches]:
        spec = replace(spec, microbatches=length)
        span = SteadySpan.for_simulation(policy(spec))
        if span.minibatches * plan.workers > most_moves:
            return None
        simulation = simulate(Schedule(spec, span.minibatches), workload, plan.cluster, ranks, span)
        if length == microbatches:
            return simulation
        extrapolated = lengthened(simulation, span, plan.replicas, length, microbatches)
        if extrapolated is not None:
            return extrapolated
    return None


def simulate(
    schedule: Schedule,
    workload: Workload,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    span: SteadySpan,
    actions: Mapping[int, Sequence[Action]] | None = None,
) -> Simulation:
    """Simulates `schedule`, whose worker (s, r) is on rank `ranks[s][r]` of the cluster.

    `actions` of each rank, which may run several workers [default: those of its order].
    """
    if actions is None:
        workers: dict[int, list[Worker]] = {}
        for stage, replica in schedule.workers:
            workers.setdefault(ranks[stage][replica], []).append((stage, replica))
        actions = {rank: schedule.actions(*own) for rank, own in workers.items()}
    run = _Simulator(schedule, actions, workload, cluster, ranks)
    run.finish()
    begin, end = steady_window(run.events, span)
    period = (end - begin) / len(span)
    busy = sum(
        (work.forward_seconds + work.backward_seconds) / schedule.spec.replicas[stage]
        + work.update_seconds / schedule.policy.round_size(stage)
        for (stage, _), work in run.works.items()
    )
    return Simulation(
        seconds_per_minibatch=period,
        bubble=bubble(busy, len(actions), period),
        steady_from=span.first,
        events=run.events,
        memory={rank: place.memory for rank, place in run.places.items()},
    )


@dataclass
class _RankState:
    """The progress of one rank: its actions, the next `position`, the `states` of its workers, and
    what is recorded. Ties in time go to the lowest `number`.
    """

    number: int
    actions: Sequence[Action]
    states: list[_WorkerState] = field(default_factory=list)
    position: int = 0
    events: list[Event] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class _WorkerState:
    """What one worker holds, `bytes_held` in all; `gradients`: any not yet used by an update."""

    place: _RankState
    versions: Versions
    in_flight: int = 0
    gradients: bool = False
    bytes_held: float = 0.0


class _Simulator:
    """Event loop over the ranks: `turns` is a heap of when each is ready for its next action.

    A rank that waits for others has no turn until they give it one.
    """

    def __init__(
        self,
        schedule: Schedule,
        actions: Mapping[int, Sequence[Action]],
        workload: Workload,
        cluster: Cluster,
        ranks: Sequence[Sequence[int]],
    ) -> None:
        self.schedule = schedule
        self.workload = workload
        self.ranks = ranks
        self.network = Network(cluster)
        self.works = {
            worker: workload.stages[worker[0]].at(cluster.device(self.rank(worker)).speed)
            for worker in schedule.workers
        }
        self.places = {
            rank: _RankState(number, listed)
            for number, (rank, listed) in enumerate(actions.items())
        }
        self.states: dict[Worker, _WorkerState] = {}
        for worker in schedule.workers:
            place = self.places[self.rank(worker)]
            own = [a for a in place.actions if (a.stage, a.replica) == worker]
            self.states[worker] = _WorkerState(place, Versions(own))
            place.states.append(self.states[worker])
        self.turns = [(0.0, place.number, place) for place in self.places.values()]
        self.arrivals: dict[tuple[Worker, Worker, Kind, int], float] = {}
        self.waiting: dict[tuple[Worker, Worker, Kind, int], float] = {}
        self.gathering: dict[tuple[int, int], dict[Worker, float]] = {}
        self.perform = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward,
            Kind.UPDATE: self._update,
            Kind.SEND_ACTIVATION: self._send,
            Kind.SEND_GRADIENT: self._send,
            Kind.RECV_ACTIVATION: self._receive,
            Kind.RECV_GRADIENT: self._receive,
            Kind.ALL_REDUCE: self._all_reduce,
        }

    def rank(self, worker: Worker) -> int:
        return self.ranks[worker[0]][worker[1]]

    def finish(self) -> None:
        heapq.heapify(self.turns)
        for worker in self.states:
            self._hold(worker, 0.0)
        while self.turns:
            now, _, place = heapq.heappop(self.turns)
            if place.position < len(place.actions):
                action = place.actions[place.position]
                self.perform[action.kind](now, (action.stage, action.replica))
            else:
                place.memory.append((now, sum(state.bytes_held for state in place.states)))
        assert all(p.position == len(p.actions) for p in self.places.values()), "deadlock"

    @property
    def events(self) -> Timeline:
        return {rank: place.events for rank, place in self.places.items()}

    def _done(self, worker: Worker, begin: float, end: float) -> None:
        """Records the action of the worker's rank from `begin` to `end`; the rank goes on."""
        place = self.states[worker].place
        place.events.append(Event(place.actions[place.position], begin, end))
        place.position += 1
        heapq.heappush(self.turns, (end, place.number, place))

    def _action(self, worker: Worker) -> Action:
        place = self.states[worker].place
        return place.actions[place.position]

    def _forward(self, now: float, worker: Worker) -> None:
        self.states[worker].in_flight += 1
        self._hold(worker, now)
        self._done(worker, now, now + self.works[worker].forward_seconds)

    def _backward(self, now: float, worker: Worker) -> None:
        """A backward pass; minibatch and weights are needed no more once its last half is done."""
        action, state = self._action(worker), self.states[worker]
        halves = 2 if action.kind is Kind.BACKWARD else 1
        end = now + self.works[worker].backward_seconds * halves / 2
        self._hold(worker, now, backward=True)
        if action.kind is not Kind.BACKWARD_INPUT:
            state.in_flight -= 1
            state.versions.gone_backward(action.version)
            state.gradients = True
        self._hold(worker, end)
        self._done(worker, now, end)

    def _update(self, now: float, worker: Worker) -> None:
        state, end = self.states[worker], now + self.works[worker].update_seconds
        state.versions.updated()
        self._hold(worker, now)
        state.gradients = False
        self._hold(worker, end)
        self._done(worker, now, end)

    def _send(self, now: float, worker: Worker) -> None:
        action = self._action(worker)
        assert action.peer is not None
        forwards = action.kind is Kind.SEND_ACTIVATION
        link = (worker[0], action.peer[0]) if forwards else (action.peer[0], worker[0])
        amount = (self.workload.forward_bytes if forwards else self.workload.backward_bytes)[link]
        here, there = self.rank(worker), self.rank(action.peer)
        arrival = now if here == there else self.network.send(now, here, there, amount)
        received = Kind.RECV_ACTIVATION if forwards else Kind.RECV_GRADIENT
        message = worker, action.peer, received, action.minibatch
        self._done(worker, now, now)
        if message in self.waiting:
            self._done(action.peer, self.waiting.pop(message), arrival)
        else:
            self.arrivals[message] = arrival

    def _receive(self, now: float, worker: Worker) -> None:
        action = self._action(worker)
        assert action.peer is not None
        message = action.peer, worker, action.kind, action.minibatch
        if message in self.arrivals:
            self._done(worker, now, max(now, self.arrivals.pop(message)))
        else:
            self.waiting[message] = now

    def _all_reduce(self, now: float, worker: Worker) -> None:
        """All replicas go on when the last has arrived and the network is done."""
        stage = worker[0]
        key = stage, self._action(worker).minibatch
        here = self.gathering.setdefault(key, {})
        here[worker] = now
        if len(here) < self.schedule.spec.replicas[stage]:
            return
        amount = self.workload.stages[stage].parameter_bytes
        end = self.network.all_reduce(now, self.ranks[stage], amount)
        for each, since in self.gathering.pop(key).items():
            self._done(each, since, end)

    def _hold(self, worker: Worker, now: float, backward: bool = False) -> None:
        """Records what the worker's rank holds from now on; `backward`: during such a pass."""
        state = self.states[worker]
        older = len(state.versions.alive) - 1
        memory = self.works[worker].memory
        state.bytes_held = memory.at(older, state.in_flight, backward, state.gradients)
        states = state.place.states
        total = sum(each.bytes_held for each in states) if len(states) > 1 else state.bytes_held
        state.place.memory.append((now, total))

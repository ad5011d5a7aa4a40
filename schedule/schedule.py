"""The one description of the order of things: what each worker of a pipeline does, and when.

What a pipeline learns is its schedule (`policy`); in which order a rank does the passes of its
workers is another matter. An order is a generator of passes, around which `write_actions` writes
the messages and updates; to add one, write such a generator and enter it in LITERATURE
(`orders.literature`). That of 1F1B is made by a list scheduler (`generate`), which follows the
rules of the policy in a balanced pipeline: it fits any replica counts, and cannot deadlock, since
everything could be done in that order. The others are in `orders`: for schedules with a flush, and
for several stages on a rank.

The engine executes `Schedule.actions`, the simulator times them, `checker` proves the lists sound.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.schedule.action import ENDS_BACKWARD, RECEIVES, Action, Kind, StageLink, Worker
from pipedream.schedule.closing import sums_together, updates_together
from pipedream.schedule.generate import ListScheduler, Step
from pipedream.schedule.orders.named import ROUND_ORDERS, round_of
from pipedream.schedule.orders.passes import Arrival, Pass, received
from pipedream.schedule.policy import Policy, policy
from pipedream.schedule.spec import PipelineSpec


@dataclass(frozen=True)
class Schedule:
    """Describes so many minibatches through a pipeline, drained at the end; weight versions count
    from 0.

    `actions` are the passes of a rank in their order, with what goes around them. A round is the
    run of consecutive minibatches whose mean gradient makes one update of a stage; the last round
    may have fewer.
    """

    spec: PipelineSpec
    minibatches: int

    def __post_init__(self) -> None:
        assert self.minibatches >= 0, self.minibatches
        same = self.policy.uniform_updates
        assert same or not self.spec.tied, "tied stages learn at the same minibatches"
        assert same or not self.spec.joint_norm, "one norm is of updates at the same minibatches"

    @cached_property
    def policy(self) -> Policy:
        return policy(self.spec)

    @property
    def workers(self) -> Iterator[Worker]:
        return self.spec.workers

    @cached_property
    def steps(self) -> Mapping[Worker, Sequence[Step]]:
        """Returns the passes that the list scheduler gives each worker."""
        steps: dict[Worker, list[Step]] = {worker: [] for worker in self.workers}
        for worker, step in ListScheduler(self.spec, self.policy, self.minibatches).steps():
            steps[worker].append(step)
        return steps

    def actions(self, *workers: Worker) -> list[Action]:
        """Returns all actions of a rank with these workers, in the pipeline's order."""
        return write_actions(self, workers, ORDERS[self.spec.order](self, workers))

    def in_round(self, stage: int, number: int) -> int:
        """Returns how many minibatches round `number` of `stage` has; 0 past the end."""
        return self.policy.in_round(stage, number, self.minibatches)

    def rounds(self, stage: int) -> int:
        """Returns how many updates `stage` makes."""
        return -(-self.minibatches // self.policy.round_size(stage))

    def delays(self, stage: int) -> dict[int, int]:
        """Returns how old the weights of each minibatch are when its gradient changes them.

        A minibatch that runs on version v and belongs to round t of `stage` makes its version t + 1
        out of version t: t - v other updates come between, the delay. For n stages of one replica,
        numbered from 0, weight stashing has

            minibatch     0  1  2  3  4  5
            stage 0       0  1  2  2  2  2      n = 3
            stage 1       0  1  1  1  1  1
            stage 2       0  0  0  0  0  0

        that is n - 1 - s at stage s once the pipeline is full.
        """
        size = self.policy.round_size(stage)
        return {
            step.minibatch: step.minibatch // size - step.version
            for worker in self.spec.of_stage(stage)
            for step in self.steps[worker]
            if step.kind is Kind.FORWARD
        }

    def makes_good(self, stage: int) -> dict[int, int]:
        """Returns which earlier update of `stage` the gradients of each round are of.

        A round t whose gradients were found at version v, the oldest of its minibatches', has those
        that update v, which makes version v + 1 out of v, would have had if it had waited. Each is
        made good once, and one whose own gradients were not late not at all. For the last but one
        of n stages of one replica, and 2BW:

            update        0  1  2  3  4  5
            makes good    -  -  1  2  3  4
        """
        size, late = self.policy.round_size(stage), dict[int, int]()
        for minibatch, delay in self.delays(stage).items():
            late[minibatch // size] = max(delay, late.get(minibatch // size, 0))
        found, best = dict[int, int](), -1
        for update in sorted(late):
            before = update - late[update]
            if before > best and before < update and late[before]:
                found[update] = best = before
        return found


Passes: TypeAlias = Iterable[tuple[Worker, Step]]
Order: TypeAlias = Callable[[Schedule, Sequence[Worker]], Passes]
"""The passes of a rank that has these workers, in the order in which it does them."""


def one_forward_one_backward(schedule: Schedule, workers: Sequence[Worker]) -> Passes:
    """Returns the order that the list scheduler finds (`generate`), for one worker on each rank."""
    (worker,) = workers
    return ((worker, step) for step in schedule.steps[worker])


def round_by_round(schedule: Schedule, workers: Sequence[Worker]) -> Passes:
    """Yields an order of `orders.named`, once for each round."""
    spec = schedule.spec
    misfit = ROUND_ORDERS[spec.order].misfit(spec)
    assert misfit is None, f"{spec.order} {misfit}"
    ((place, replica),) = {(spec.place_of[stage], replica) for stage, replica in workers}
    for number in range(schedule.rounds(0)):
        first = number * spec.microbatches
        last = first + schedule.in_round(0, number)
        replicas = spec.replicas[0]
        minibatches = range(first + (replica - first) % replicas, last, replicas)
        for pass_, arrivals in arriving(spec, len(minibatches))[place]:
            for source, target, is_gradient, b in arrivals:
                kind = Kind.RECV_GRADIENT if is_gradient else Kind.RECV_ACTIVATION
                yield (target, replica), Step(0, kind, minibatches[b], number, source)
            yield (pass_.stage, replica), Step(0, pass_.kind, minibatches[pass_.microbatch], number)


@lru_cache(maxsize=64)
def arriving(
    spec: PipelineSpec, microbatches: int
) -> Sequence[Sequence[tuple[Pass, list[Arrival]]]]:
    return received(spec, round_of(spec, microbatches))


ORDERS: dict[str, Order] = {
    DEFAULT_ORDER: one_forward_one_backward,
    **dict.fromkeys(ROUND_ORDERS, round_by_round),
}


def forwards(
    replicas: Sequence[int],
    links: Collection[StageLink],
    minibatches: int,
    workers: Sequence[Worker],
) -> list[Action]:
    """Returns what a rank with these `workers` does where there are forward passes alone, as in
    evaluation.

    Minibatches in ascending order on every rank, on version 0, and each through the stages in
    their order. It cannot deadlock, whatever is waited for, since all that a pass needs comes from
    earlier stages and smaller minibatches. Messages of a minibatch are received in the order of
    the stages that send them, so all messages between two ranks have one order.
    """
    ordered = sorted(set(links))
    actions: list[Action] = []
    for b in range(minibatches):
        replica_of = {
            stage: replica for stage, replica in workers if b % replicas[stage] == replica
        }
        coming = [link for link in ordered if link[1] in replica_of]
        for stage, replica in sorted(replica_of.items()):
            needed = max((source for source, target in coming if target == stage), default=-1)
            while coming and coming[0][0] <= needed:
                source, target = coming.pop(0)
                peer = source, b % replicas[source]
                actions.append(Action(Kind.RECV_ACTIVATION, target, replica_of[target], b, 0, peer))
            actions.append(Action(Kind.FORWARD, stage, replica, b, 0))
            for target in (target for source, target in ordered if source == stage):
                peer = target, b % replicas[target]
                actions.append(Action(Kind.SEND_ACTIVATION, stage, replica, b, 0, peer))
    return actions


def write_actions(schedule: Schedule, workers: Collection[Worker], passes: Passes) -> list[Action]:
    """Returns all that a rank with these `workers` does, in order, given their passes.

    Receives stand right before the pass that needs them, unless the passes say where, and sends
    right after the pass that makes them. After a worker's last backward pass of a round come
    ALL_REDUCE (only where `PipelineSpec.reduces`; see `sums_together`), NORM
    (only with a `joint_norm`; see `updates_together`) and UPDATE. A replica with no minibatch
    in a round takes part in these all the same. Of a backward pass in two halves the first is what
    receives and sends, the second what closes a round.
    """
    actions: list[Action] = []
    writers = {worker: _ActionWriter(schedule, worker, actions) for worker in workers}
    for worker, step in passes:
        writers[worker].write(step)
    reduces = any(schedule.spec.reduces(stage) for stage, _ in workers)
    if reduces and len(workers) > 1 and schedule.policy.drains:
        actions = sums_together(actions, workers, schedule.spec.tied)
    return updates_together(actions, workers) if schedule.spec.joint_norm else actions


_Messages: TypeAlias = tuple[Kind, Sequence[Sequence[Worker]], Kind, Sequence[Sequence[Worker]]]
"""The messages around a pass: received before it, sent after it; with the workers of each stage."""


class _ActionWriter:
    """Writes the passes of one worker with their messages and updates."""

    def __init__(self, schedule: Schedule, worker: Worker, actions: list[Action]) -> None:
        self.schedule, self.actions = schedule, actions
        spec = schedule.spec
        self.stage, self.replica = worker
        self.replicas = spec.replicas[self.stage]
        self.round_size = schedule.policy.round_size(self.stage)
        sources = [spec.of_stage(source) for source in spec.sources(self.stage)]
        targets = [spec.of_stage(target) for target in spec.targets(self.stage)]
        backward = (Kind.RECV_GRADIENT, targets, Kind.SEND_GRADIENT, sources)
        self.messages: Mapping[Kind, _Messages] = {
            Kind.FORWARD: (Kind.RECV_ACTIVATION, sources, Kind.SEND_ACTIVATION, targets),
            Kind.BACKWARD: backward,
            Kind.BACKWARD_INPUT: backward,
            Kind.BACKWARD_WEIGHT: (Kind.RECV_GRADIENT, [], Kind.SEND_GRADIENT, []),
        }
        reduces = spec.reduces(self.stage)
        self.closing = (
            *([Kind.ALL_REDUCE] if reduces else []),
            *([Kind.NORM] if spec.joint_norm else []),
            Kind.UPDATE,
        )
        self.received: set[tuple[Kind, int, Worker]] = set()
        self.round = 0
        self.left = self._own()
        self._close_rounds()

    def write(self, step: Step) -> None:
        _, kind, minibatch, version, source = step
        stage, replica, add = self.stage, self.replica, self.actions.append
        if kind in RECEIVES:
            peer = source, minibatch % self.schedule.spec.replicas[source]
            self.received.add((kind, minibatch, peer))
            add(Action(kind, stage, replica, minibatch, version, peer))
            return
        receive, sources, send, targets = self.messages[kind]
        for peers in sources:
            peer = peers[minibatch % len(peers)]
            if (receive, minibatch, peer) in self.received:
                self.received.remove((receive, minibatch, peer))
            else:
                add(Action(receive, stage, replica, minibatch, version, peer))
        add(Action(kind, stage, replica, minibatch, version))
        for peers in targets:
            peer = peers[minibatch % len(peers)]
            add(Action(send, stage, replica, minibatch, version, peer))
        if kind in ENDS_BACKWARD:
            self.left -= 1
            self._close_rounds()

    def _close_rounds(self) -> None:
        """Writes what closes the rounds that this worker has finished."""
        while not self.left and (divisor := self.schedule.in_round(self.stage, self.round)):
            first = self.round * self.round_size
            self.round += 1
            self.left = self._own()
            for kind in self.closing:
                self.actions.append(
                    Action(kind, self.stage, self.replica, first, self.round, None, divisor)
                )

    def _own(self) -> int:
        """Returns how many minibatches of the round run on this worker."""
        first = self.round * self.round_size
        count = self.schedule.in_round(self.stage, self.round)
        return len(range((self.replica - first) % self.replicas, count, self.replicas))

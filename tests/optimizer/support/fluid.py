"""The simulator's model a second time: slow, plain, and from its description alone.

A rank does its actions in order. A pass or an update takes its seconds, and those that the messages
before it keep the rank busy; the last backward pass of a round also those that the sums beside it
do; a send takes none; a receive waits for its message; an all-reduce waits for the sum. At a norm
the rank adds to a sum of eight bytes over all ranks, which it waits for at the last of its workers.
Each message or part of a sum is bytes in a queue. There are two queues for every pair of ranks, of
activations and of gradients, and one for the ring of every stage and that of all ranks, and each
has a list of ports. At every moment

1. all ranks do what they can do without time going on,
2. the first of each queue goes, a message only if its receive is posted,
3. all rates are found anew, max-min fair,
4. time goes on to the next moment at which anything at all ends.

What stays on its rank goes through no queue: it is there at once.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import inf, prod
from typing import NamedTuple, TypeAlias, TypeVar

from pipedream.graph.cluster import Cluster, Link
from pipedream.optimizer.simulate.workload import StageWork, Workload
from pipedream.schedule.action import ENDS_BACKWARD, RECEIVES, SENDS, Action, Kind, Worker
from pipedream.schedule.overlap import LOOK_AHEAD

Span: TypeAlias = tuple[float, float]
"""Seconds at which an action begins and ends."""

Port: TypeAlias = tuple[int, int, str]
"""(level, component, "out" or "in"): where a component sends or receives over the links of that
level, 1 the innermost; the components that these join count from 0, on level 1 they are ranks."""

Road = TypeVar("Road", bound=Hashable)
Place = TypeVar("Place", bound=Hashable)


_ALL = -1
"""In the place of a stage: all of them."""


class DeadlockError(Exception):
    """Nothing goes on any more, though not all is done."""


def fair_rates(
    roads: Mapping[Road, Collection[Place]], capacity: Mapping[Place, float]
) -> dict[Road, float]:
    """The max-min fair rate of each road, which passes some places, in the unit of their capacity.

    All rates rise together from nothing. When a place is full, the roads through it stay as they
    are, and the others rise on.
    """
    rates: dict[Road, float] = {}
    while len(rates) < len(roads):
        rising = {road: places for road, places in roads.items() if road not in rates}
        full_at = {}
        for place in {place for places in rising.values() for place in places}:
            taken = sum(rate for road, rate in rates.items() if place in roads[road])
            users = sum(place in places for places in rising.values())
            full_at[place] = (capacity[place] - taken) / users
        level = min(full_at.values())
        for road, places in rising.items():
            if any(full_at[place] == level for place in places):
                rates[road] = level
    return rates


class Need(NamedTuple):
    """What a message or a sum needs of a cluster: a way through ports, `size` bytes through each of
    them, `latency` in seconds, and the share of its time in which its ranks are `busy`; `seconds`:
    on idle ports, without the latency.
    """

    ports: tuple[Port, ...]
    size: float
    seconds: float
    latency: float
    busy: float


@dataclass(frozen=True)
class Wires:
    """The ports of a cluster, and what has to go through them."""

    cluster: Cluster

    def component(self, rank: int, level: int) -> int:
        """The one around the rank that the links of this level join to others."""
        return rank // prod(self.cluster.machines[: level - 1])

    def between(self, source: int, target: int) -> list[Port]:
        """The ports that a message passes, those of the lowest level first."""
        ports = []
        for level in range(1, len(self.cluster.machines) + 1):
            here, there = self.component(source, level), self.component(target, level)
            if here != there:
                ports += [(level, here, "out"), (level, there, "in")]
        return ports

    def rate(self, port: Port) -> float:
        """Bytes per second; of a measured link those beyond its last point."""
        link = self.cluster.link(port[0])
        if link.bandwidth is not None:
            return link.bandwidth
        (fewer, sooner), (more, later) = link.points[-2:]
        return (more - fewer) / (later - sooner)

    def message(self, source: int, target: int, amount: float) -> Need:
        """Of so many bytes. The slowest link on the way sets the pace, the highest the latency."""
        ports = self.between(source, target)
        highest = max(level for level, _, _ in ports)
        links = [self.cluster.link(level) for level in range(1, highest + 1)]
        return self._need(ports, links, amount, 1, _latency(links[-1]))

    def all_reduce(self, ranks: Sequence[int], amount: float) -> Need:
        """A ring of the ranks: 2 (m - 1) steps, in each of which every one of them sends an m-th of
        the bytes to the next. All steps wait for the slowest.
        """
        ring = sorted(ranks)
        pairs = [self.between(*pair) for pair in pairwise([*ring, ring[0]])]
        highest = [max(level for level, _, _ in ports) for ports in pairs]
        links = [self.cluster.ring_link(level) for level in range(1, max(highest) + 1)]
        latency = max(_latency(links[level - 1]) for level in highest)
        ports = [port for passed in pairs for port in passed]
        return self._need(ports, links, amount / len(ring), 2 * (len(ring) - 1), latency)

    def _need(
        self, ports: Sequence[Port], links: Sequence[Link], amount: float, steps: int, wait: float
    ) -> Need:
        slowest = max(links, key=lambda link: _seconds(link, amount))
        seconds = steps * _seconds(slowest, amount)
        # As many bytes as take so long where nothing else passes.
        size = seconds * min(map(self.rate, ports))
        return Need(tuple(dict.fromkeys(ports)), size, seconds, steps * wait, slowest.busy)


def _latency(link: Link) -> float:
    """Seconds of a message of next to nothing."""
    return float(link.seconds(1e-300))


def _seconds(link: Link, amount: float) -> float:
    """Seconds for which a message of so many bytes takes up the link."""
    return max(0.0, float(link.seconds(amount)) - _latency(link))


@dataclass
class _Item:
    """A message or a part of a sum: `left` bytes that are not yet through `queue` (None: it needs
    none), then `latency` seconds; `through` and `there` are when those end.

    `busy`: seconds that a message takes of its ranks. `receiver`: its rank, and the place of the
    receive among the actions of that one.
    """

    queue: Hashable = None
    left: float = 0.0
    latency: float = 0.0
    busy: float = 0.0
    receiver: tuple[int, int] | None = None
    through: float = inf

    @property
    def there(self) -> float:
        return self.through + self.latency


@dataclass
class _Part:
    """Of a sum. It begins when all `members` have given: `given` has the seconds at which each has
    its gradients, known when the pass begins that makes them.
    """

    item: _Item
    members: int
    given: list[float] = field(default_factory=list)
    begun: bool = False

    @property
    def begins(self) -> float:
        return max(self.given) if len(self.given) == self.members else inf


@dataclass
class _Rank:
    """How far a rank is; `begun`, and for a pass `until`, of the action that it is at. `debt`: the
    seconds for which messages still have to keep it busy.
    """

    actions: Sequence[Action]
    spans: list[Span] = field(default_factory=list)
    begun: float | None = None
    until: float | None = None
    debt: float = 0.0

    @property
    def position(self) -> int:
        return len(self.spans)

    def sum_of(self, position: int) -> tuple[int, int] | None:
        """The sum (stage, first minibatch) to which the action there contributes: it is the last
        that ends a backward pass before its worker's all-reduce.
        """
        action = self.actions[position]
        if action.kind not in ENDS_BACKWARD:
            return None
        for later in self.actions[position + 1 :]:
            if _worker(later) == _worker(action):
                if later.kind in ENDS_BACKWARD:
                    return None
                if later.kind is Kind.ALL_REDUCE:
                    return later.stage, later.minibatch
        return None

    def closes(self, stage: int) -> bool:
        """Whether a pass of this rank contributes to a sum of the stage: without a minibatch none
        does.
        """
        sums = (self.sum_of(position) for position in range(len(self.actions)))
        return any(which is not None and which[0] == stage for which in sums)


class _Play:
    """Rank after rank and moment after moment; `now` is in seconds."""

    def __init__(
        self,
        actions: Mapping[int, Sequence[Action]],
        workload: Workload,
        cluster: Cluster,
        ranks: Sequence[Sequence[int]],
        ahead: int,
    ) -> None:
        self.workload, self.cluster, self.placed, self.ahead = workload, cluster, ranks, ahead
        self.wires = Wires(cluster)
        self.ranks = {number: _Rank(listed) for number, listed in actions.items()}
        self.now = 0.0
        self.ports: dict[Hashable, tuple[Port, ...]] = {}
        self.queues: dict[Hashable, list[_Item]] = {}
        self.on_their_way: list[_Item] = []  # through their queues
        self.messages: dict[tuple[Worker, Worker, bool, int], _Item] = {}
        self.sums: dict[tuple[int, int], list[_Part]] = {}
        for number, rank in self.ranks.items():
            for position, action in enumerate(rank.actions):
                if action.kind in RECEIVES:
                    self.messages[_message(action)] = self._message(action, (number, position))
                elif action.kind is Kind.ALL_REDUCE:
                    key = action.stage, action.minibatch
                    self.sums.setdefault(key, self._parts(action.stage))
                elif action.kind is Kind.NORM:
                    self.sums.setdefault((_ALL, action.minibatch), [self._norm()])

    def _message(self, receive: Action, receiver: tuple[int, int]) -> _Item:
        assert receive.peer is not None
        (stage, replica), target = receive.peer, receiver[0]
        source = self.placed[stage][replica]
        if source == target:
            return _Item()
        forward = receive.kind is Kind.RECV_ACTIVATION
        amount = (
            self.workload.forward_bytes[stage, receive.stage]
            if forward
            else self.workload.backward_bytes[receive.stage, stage]
        )
        need = self.wires.message(source, target, amount)
        queue = "from", source, "to", target, forward
        self.ports[queue] = need.ports
        busy = need.busy * (need.seconds + need.latency)
        return _Item(queue, need.size, need.latency, busy, receiver)

    def _parts(self, stage: int) -> list[_Part]:
        parts, members = [], self.placed[stage]
        for amount, _ in self.workload.stages[stage].sums:
            if len(members) == 1:
                parts.append(_Part(_Item(), 1))
                continue
            need = self.wires.all_reduce(members, amount)
            queue = "ring of", stage
            self.ports[queue] = need.ports
            parts.append(_Part(_Item(queue, need.size, need.latency), len(members)))
        return parts

    def _norm(self) -> _Part:
        workers, ranks = sum(map(len, self.placed)), sorted({*chain(*self.placed)})
        if len(ranks) == 1:
            return _Part(_Item(), workers)
        need, queue = self.wires.all_reduce(ranks, 8.0), "ring of all"
        self.ports[queue] = need.ports
        return _Part(_Item(queue, need.size, need.latency), workers)

    def _closing(self, stage: int, seconds: float) -> tuple[float, list[float]]:
        """The last backward pass of a round, of so many seconds on the slowest rank of the stage:
        how long it takes beside its sums, which go one after the other; and at what share of that
        each of them begins.

        Here by what the pass has done at any time: while a sum goes, as much less as that keeps the
        rank busy. A sum that does so for longer than it goes, goes on for so long beside a pass.
        """
        sums, begins, work = self.workload.stages[stage].sums, [], [(0.0, 0.0)]
        for amount, after in sums:
            time, done = work[-1]
            need = self.wires.all_reduce(self.placed[stage], amount)
            if len(self.placed[stage]) == 1:
                need = need._replace(seconds=0.0, busy=0.0)
            # Not done + wait: rounding might leave some of a pass that is done entirely.
            ready = max(done, after * seconds)
            time, done = time + ready - done, ready
            begins.append(time)
            work.append((time, done))
            taken = need.busy * (need.seconds + need.latency)
            longer = min(max(0.0, seconds - done), max(0.0, taken - need.seconds))
            time, done = time + need.seconds + longer, done + max(0.0, need.seconds - taken)
            work.append((time, done))
        work.append((work[-1][0] + seconds, work[-1][1] + seconds))
        whole = next(
            late + (seconds - more) * (later - late) / (most - more) if most > more else late
            for (late, more), (later, most) in pairwise(work)
            if most >= seconds
        )
        return whole, [min(1.0, begin / whole) if whole else 1.0 for begin in begins]

    def run(self) -> dict[int, list[Span]]:
        """Until nothing happens any more. Raises DeadlockError."""
        while True:
            self._settle()
            rates = fair_rates(*self._going())
            ends = {queue: self.now + self.queues[queue][0].left / rates[queue] for queue in rates}
            moment = min([*ends.values(), *self._moments()], default=inf)
            if moment == inf:
                break
            for queue, end in ends.items():
                first = self.queues[queue][0]
                first.left -= rates[queue] * (moment - self.now)
                if end <= moment or first.left <= 0:
                    self._is_through(self.queues[queue].pop(0), moment)
            self.now = moment
        for rank in self.ranks.values():
            if rank.position < len(rank.actions):
                raise DeadlockError(str(rank.actions[rank.position]))
        return {number: rank.spans for number, rank in self.ranks.items()}

    def _settle(self) -> None:
        """All that happens now."""
        changed = True
        while changed:
            changed = any(self._act(number) for number in self.ranks)
            for parts in self.sums.values():
                for part in parts:
                    if not part.begun and part.begins <= self.now:
                        part.begun = changed = True
                        self._begin(part.item)

    def _going(self) -> tuple[dict[Hashable, tuple[Port, ...]], dict[Port, float]]:
        """The queues whose first goes, with their ports, and bytes per second of these."""
        going = {
            queue: self.ports[queue]
            for queue, waiting in self.queues.items()
            if waiting and self._is_posted(waiting[0])
        }
        return going, {port: self.wires.rate(port) for ports in going.values() for port in ports}

    def _is_posted(self, item: _Item) -> bool:
        """Whether the receiver is no more than so many actions from the receive, itself counted."""
        if item.receiver is None:
            return True
        number, position = item.receiver
        return position < self.ranks[number].position + self.ahead

    def _moments(self) -> list[float]:
        """Those to come, but for ends in the queues."""
        self.on_their_way = [item for item in self.on_their_way if item.there > self.now]
        coming = [item.there for item in self.on_their_way]
        coming += [rank.until for rank in self.ranks.values() if rank.until is not None]
        coming += [part.begins for parts in self.sums.values() for part in parts]
        return [moment for moment in coming if moment > self.now]

    def _begin(self, item: _Item) -> None:
        if item.queue is None:
            self._is_through(item, self.now)
        else:
            self.queues.setdefault(item.queue, []).append(item)

    def _is_through(self, item: _Item, moment: float) -> None:
        item.through = moment
        self.on_their_way.append(item)

    def _act(self, number: int) -> bool:
        """Whether the rank began or ended an action."""
        rank = self.ranks[number]
        if rank.position == len(rank.actions):
            return False
        action, begins = rank.actions[rank.position], rank.begun is None
        if begins:
            rank.begun = self.now
            self._begin_action(number, rank, action)
        assert rank.begun is not None
        if not self._is_over(rank, action):
            return begins
        if action.kind in RECEIVES:
            rank.debt += self.messages[_message(action)].busy
        rank.spans.append((rank.begun, self.now))
        rank.begun = rank.until = None
        return True

    def _begin_action(self, number: int, rank: _Rank, action: Action) -> None:
        if action.kind in SENDS:
            message = self.messages[_message(action)]
            rank.debt += message.busy
            self._begin(message)
        elif action.kind is Kind.ALL_REDUCE:
            own = action.stage, action.minibatch
            if all(rank.sum_of(before) != own for before in range(rank.position)):
                self._give(own, 0.0)
        elif action.kind is Kind.NORM:
            self._give((_ALL, action.minibatch), 0.0)
        elif action.kind not in RECEIVES:
            work = self.workload.stages[action.stage]
            seconds = _pass_seconds(work.at(self.cluster.device(number).speed), action.kind)
            closed = rank.sum_of(rank.position)
            if closed is not None:
                own = [n for n in self.placed[action.stage] if self.ranks[n].closes(action.stage)]
                speed = min(self.cluster.device(other).speed for other in own)
                slowest = _pass_seconds(work.at(speed), action.kind)
                whole, begins = self._closing(action.stage, slowest)
                seconds += whole - slowest + rank.debt
                self._give(closed, seconds, begins)
            else:
                seconds += rank.debt
            rank.until, rank.debt = self.now + seconds, 0.0

    def _give(
        self, which: tuple[int, int], seconds: float, begins: Sequence[float] | None = None
    ) -> None:
        """A pass of so many seconds begins, with the gradients of each part at such a share of it
        [default: at its beginning].
        """
        parts = self.sums[which]
        for part, share in zip(parts, begins or [0.0] * len(parts), strict=True):
            part.given.append(self.now + seconds * share)

    def _is_over(self, rank: _Rank, action: Action) -> bool:
        if action.kind in SENDS:
            return True
        if action.kind in RECEIVES:
            return self.messages[_message(action)].there <= self.now
        if action.kind is Kind.ALL_REDUCE:
            parts = self.sums[action.stage, action.minibatch]
            return all(part.item.there <= self.now for part in parts)
        if action.kind is Kind.NORM:
            later = rank.actions[rank.position + 1 :]
            if any(a.kind is Kind.NORM and a.minibatch == action.minibatch for a in later):
                return True
            (part,) = self.sums[_ALL, action.minibatch]
            return part.item.there <= self.now
        assert rank.until is not None
        return rank.until <= self.now


def _pass_seconds(work: StageWork, kind: Kind) -> float:
    if kind is Kind.FORWARD:
        return work.forward_seconds
    if kind is Kind.UPDATE:
        return work.update_seconds
    return work.backward_seconds if kind is Kind.BACKWARD else work.backward_seconds / 2


def _worker(action: Action) -> Worker:
    return action.stage, action.replica


def _message(action: Action) -> tuple[Worker, Worker, bool, int]:
    """Its name at both ends: source, target, whether an activation, minibatch."""
    assert action.peer is not None
    ends = _worker(action), action.peer
    source, target = ends if action.kind in SENDS else ends[::-1]
    forward = action.kind in (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION)
    return source, target, forward, action.minibatch


def fluid_spans(
    actions: Mapping[int, Sequence[Action]],
    workload: Workload,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    ahead: int = LOOK_AHEAD,
) -> dict[int, list[Span]]:
    """When each of the `actions` of each rank begins and ends; worker (s, r) is on `ranks[s][r]`.

    Receives are posted so many actions `ahead`. Raises DeadlockError.
    """
    return _Play(actions, workload, cluster, ranks, ahead).run()

"""The time of a plan in closed form: what the simulator says, if everything overlaps that can.

Symbols, of stage s on r replicas: F and B, seconds of its passes, and for which messages keep it
busy; U, of its update; N, minibatches of a round; R, seconds of its sum, of which E come after the
backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import islice
from math import lcm, prod
from typing import NamedTuple, TypeAlias

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost.network import Network, Port
from pipedream.optimizer.simulate.sums import gather_seconds, parts_of, pass_with_sums
from pipedream.optimizer.simulate.workload import Workload
from pipedream.schedule.in_flight import StageTimes, useful_in_flight
from pipedream.schedule.policy import Policy

_MOST_PAIRS = 64
"""Pairs of replicas examined for each link."""

_LEEWAY = 1.02
"""Tolerated slowdown: between workers with equal work, a message of almost nothing would otherwise
cost every stage one more minibatch in flight."""

_STEPS = 12
"""To where the sums are as slow as the messages make them that pass at the pace they allow."""

_User: TypeAlias = tuple[int, int]
"""What uses a port: messages from one stage to another, or a stage's sums, (stage, stage)."""


class StageSeconds(NamedTuple):
    """Seconds per minibatch of a stage, and the limit: compute, all-reduce or boundary."""

    seconds: float
    limit: str


class ClosedForm:
    """The closed form for the work of a plan's stages on these ranks under a schedule.

    Without a flush a minibatch takes as long as on the busiest of the stages, of the ports, and of
    the ways through the pipeline with so many in flight:

    - a stage: (N (F + B) / r + U + E) / N, where messages that pass the ports of the ring make R
      longer;
    - a port: the bytes per minibatch of all messages and sums that pass, over its rate;
    - from a stage to the end and back: what that takes alone, over the minibatches in flight there.

    With one, a round of M takes the time of the way through the pipeline, of M/r - 1 more
    minibatches in the busiest stage, and of sum and update where these outlast the passes of
    earlier stages (GPipe, NeurIPS 2019, section 2.3, for stages that are not alike).
    """

    def __init__(
        self, workload: Workload, cluster: Cluster, ranks: Sequence[Sequence[int]], policy: Policy
    ) -> None:
        self.network, self.ranks, self.policy = Network(cluster), ranks, policy
        self.works = [
            work.at(min(cluster.device(rank).speed for rank in own))
            for work, own in zip(workload.stages, ranks, strict=True)
        ]
        self.workload = workload
        self.parts = [
            parts_of(work, own, self.network) for work, own in zip(self.works, ranks, strict=True)
        ]
        self.exposed = [self._exposed(stage) for stage in range(len(ranks))]
        self.updates = [
            work.update_seconds + gather_seconds(work, own, self.network)
            for work, own in zip(self.works, ranks, strict=True)
        ]
        self.busy = self._busy()
        self.uses: dict[Port, dict[_User, float]] = defaultdict(dict)
        self.ports = self._ports()

    def under(self, policy: Policy) -> ClosedForm:
        """The same work under a policy that differs in the minibatches in flight alone."""
        changed = copy(self)
        changed.policy = policy
        return changed

    @property
    def seconds(self) -> float:
        """Seconds per minibatch."""
        if self.policy.drains:
            return self._round() / self.policy.spec.microbatches
        return max(*(stage.seconds for stage in self.stages), self._slowest_port, self._slowest_way)

    @property
    def why(self) -> str:
        """What limits the plan, in words."""
        stages, last = self.stages, len(self.ranks) - 1
        slowest = max(range(len(stages)), key=lambda stage: stages[stage].seconds)
        paced = max(stages[slowest].seconds, self._slowest_port)
        if not self.policy.drains and self._slowest_way > paced:
            return "messages there and back, with so few minibatches in flight"
        if paced > stages[slowest].seconds:
            return "the link of a machine"
        what = {"compute": "the passes", "all-reduce": "the sums", "boundary": "the messages"}
        name = "the only stage" if not last else f"stage {slowest}"
        return f"{what[stages[slowest].limit]} of {name}"

    @cached_property
    def bound(self) -> float:
        """Seconds per minibatch that stages and ports take at least."""
        alone = (self._stage(stage, after).seconds for stage, after in enumerate(self.exposed))
        return max(*alone, self._slowest_port)

    @cached_property
    def stages(self) -> list[StageSeconds]:
        """Each with its busiest port, and with its sums beside the messages of the pipeline."""
        beside = {s: self._messages_beside(s) for s, own in enumerate(self.ranks) if len(own) > 1}
        exposed, period = list(self.exposed), self.bound
        for _ in range(0 if self.policy.drains else _STEPS):
            for stage, messages in beside.items():
                exposed[stage] = self._exposed(stage, 1 + _delay(messages, period))
            paces = [self._stage(stage, exposed[stage]).seconds for stage in beside]
            period = (period + max(paces, default=period)) / 2
        return [self._stage(stage, over) for stage, over in enumerate(exposed)]

    def _messages_beside(self, stage: int) -> list[float]:
        """Returns how long, per minibatch, messages use each port of the stage's ring."""
        size = self.policy.round_size(stage)
        ring = self.network.ring(self.ranks[stage])
        return [self.ports[port] - self.uses[port][stage, stage] / size for port in ring]

    def _stage(self, stage: int, exposed: float) -> StageSeconds:
        """Returns the figures with `exposed` seconds of its sum after the backward pass."""
        compute, reduced = self.shares(stage, exposed)
        port = self.busiest_port(self.ranks[stage])
        if port > compute + reduced:
            return StageSeconds(port, "boundary")
        return StageSeconds(compute + reduced, "all-reduce" if reduced > compute else "compute")

    def shares(self, stage: int, exposed: float) -> tuple[float, float]:
        """Seconds per minibatch of passes and update, and of what comes after: `exposed` seconds of
        the sum.
        """
        work, size = self.works[stage], self.policy.round_size(stage)
        passes = work.forward_seconds + work.backward_seconds + self.busy[stage]
        return passes / len(self.ranks[stage]) + self.updates[stage] / size, exposed / size

    def _exposed(self, stage: int, slower: float = 1.0) -> float:
        """Returns E where the sum takes `slower` times as long as on an idle network."""
        if len(self.ranks[stage]) == 1:
            return 0.0
        parts = [
            (replace(idle, seconds=slower * idle.seconds), after)
            for idle, after in self.parts[stage]
        ]
        backward = self.works[stage].backward_seconds
        passed = pass_with_sums(backward, parts)
        return passed.seconds + passed.over - backward

    def _busy(self) -> list[float]:
        """Returns how long the messages of a minibatch keep a worker of each stage busy."""
        busy = [0.0] * len(self.ranks)
        if not any(link.busy for link in self.network.links):
            return busy
        for link in self.workload.forward_bytes:
            for user in (link, link[::-1]):
                size = self._size(user)
                for share, source, target in self._pairs(user):
                    taken = share * self.network.message(source, target, size).busy
                    for stage in user:
                        busy[stage] += taken
        return busy

    def _ports(self) -> dict[Port, float]:
        """Returns the seconds per minibatch in which each port is in use; notes them by user."""
        ports: dict[Port, float] = defaultdict(float)
        for link in self.workload.forward_bytes:
            for user in (link, link[::-1]):
                size = self._size(user)
                for share, source, target in self._pairs(user) if size else ():
                    for port in self.network.path(source, target):
                        seconds = size / self.network.rate(port)
                        ports[port] += share * seconds
                        self.uses[port][user] = seconds
        for stage, own in enumerate(self.ranks):
            if len(own) > 1:
                amount = 2 * (len(own) - 1) / len(own) * self.works[stage].parameter_bytes
                for port in self.network.ring(own):
                    seconds = amount / self.network.rate(port)
                    ports[port] += seconds / self.policy.round_size(stage)
                    self.uses[port][stage, stage] = seconds
        return dict(ports)

    def _size(self, user: _User) -> float:
        """Returns the bytes of a message from one stage to another, forwards or back."""
        source, target = user
        if source < target:
            return self.workload.forward_bytes.get(user, 0.0)
        return self.workload.backward_bytes.get((target, source), 0.0)

    def _pairs(self, user: _User) -> Iterator[tuple[float, int, int]]:
        """Yields the pairs of ranks that send these messages, with their share of minibatches."""
        sources, targets = (self.ranks[stage] for stage in user)
        count = lcm(len(sources), len(targets))
        for b in range(count):
            here, there = sources[b % len(sources)], targets[b % len(targets)]
            if here != there:
                yield 1 / count, here, there

    def busiest_port(self, ranks: Sequence[int]) -> float:
        """Seconds per minibatch in which the busiest port of these ranks is in use."""
        devices = {Port(1, rank, out) for rank in ranks for out in (False, True)}
        return max((self.ports[port] for port in devices & self.ports.keys()), default=0.0)

    @property
    def _slowest_port(self) -> float:
        return max(self.ports.values(), default=0.0)

    @property
    def _slowest_way(self) -> float:
        """Returns the time from a stage to the last and back, over the minibatches in flight."""
        slowest, way = 0.0, 0.0
        for stage in reversed(range(len(self.ranks))):
            work, replicas = self.works[stage], len(self.ranks[stage])
            way += work.forward_seconds + work.backward_seconds
            slowest = max(slowest, way / (self.policy.in_flight(stage) * replicas))
            way += self._messages(stage - 1, stage)
        return slowest

    def _messages(self, source: int, target: int) -> float:
        """Returns the seconds of a message between two stages and of the answer."""
        return self._message((source, target)) + self._message((target, source))

    def _message(self, user: _User) -> float:
        """Seconds of the slowest message from one stage to another, if all else that passes its
        ports begins when it does: of fair shares it loses as much to each as the shorter takes.
        """
        size, slowest = self._size(user), 0.0
        for _, source, target in islice(self._pairs(user), _MOST_PAIRS if size else 0):
            alone = self.network.message(source, target, size).total
            used = [self.uses[port] for port in self.network.path(source, target)]
            lost = max(
                sum(min(port[user], seconds) for other, seconds in port.items() if other != user)
                for port in used
            )
            slowest = max(slowest, alone + lost)
        return slowest

    def useful_in_flight(self, slower: float = 1.0) -> tuple[int, ...]:
        """The minibatches in flight of each stage that keep the pace of stages and ports, if a
        message takes so many times as long as by `_message`.
        """
        stages = range(len(self.ranks))
        links = list(self.workload.forward_bytes)
        pace = StageTimes(
            period=_LEEWAY * self.bound,
            forward=[work.forward_seconds for work in self.works],
            backward=[work.backward_seconds for work in self.works],
            update=[self._closing(stage) for stage in stages],
            there={link: slower * self._message(link) for link in links},
            back={link: slower * self._message(link[::-1]) for link in links},
        )
        replicas = [len(own) for own in self.ranks]
        return useful_in_flight(replicas, pace, links, self.policy.synchronized)

    def _closing(self, stage: int) -> float:
        """Returns the seconds of sum and update per minibatch of a worker."""
        seconds = self.exposed[stage] + self.updates[stage]
        return seconds * len(self.ranks[stage]) / self.policy.round_size(stage)

    def _round(self) -> float:
        """Returns the seconds of a round of a schedule with a flush."""
        size = self.policy.spec.microbatches
        passes = [work.forward_seconds + work.backward_seconds for work in self.works]
        busiest, back = 0.0, 0.0
        for stage, own in reversed(list(enumerate(self.ranks))):
            back += passes[stage]
            paced = max(passes[stage], len(own) * self.busiest_port(own))
            paced = max(paced, back / self.policy.in_flight(stage))
            busiest = max(busiest, (size / len(own) - 1) * paced)
            back += self._messages(stage - 1, stage) if stage else 0.0
        messages = sum(self._messages(stage - 1, stage) for stage in range(1, len(self.ranks)))
        whole, before = sum(passes) + messages + busiest, 0.0
        longest = whole
        for stage in range(len(self.ranks)):
            before += self._messages(stage - 1, stage) if stage else 0.0
            after = self.exposed[stage] + self.updates[stage]
            longest = max(longest, whole - before + after)
            before += passes[stage]
        return longest


def _delay(messages: Sequence[float], period: float) -> float:
    """By which share of its time messages delay a sum that passes the same ports, each used by them
    for so many seconds of a `period`: while one passes any port, the sum has half of that. Taken
    are ports used independent of each other, and every other message to fall between sums (it goes
    where passes are).
    """
    free = prod(max(0.0, 1 - seconds / period) for seconds in messages) if period > 0 else 0.0
    return (1 - free) / 2

"""Channels of messages between ranks: the transport uses them, the checker proves their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import lcm
from typing import NamedTuple, TypeAlias

from pipedream.graph.plan import RankAssignment, WorkerGroup
from pipedream.schedule.action import SENDS, Action, Kind, StageLink

_MOST_STAGES = 1 << 15

RankLink: TypeAlias = tuple[int, int, bool]
"""(source rank, target rank, whether with gradients)."""


class Channel(NamedTuple):
    """One direction of one link, between two ranks or two stages of the same rank.

    `source` and `target` are the ranks that send and receive. Messages arrive in order.
    """

    source: int
    target: int
    link: StageLink
    is_gradient: bool = False

    @staticmethod
    def of(action: Action, assignment: RankAssignment, device: int = 0) -> tuple[Channel, ...]:
        """The channels of a send or a receive, for this device of the worker: one of a receive; of
        a send as many as there are devices of the peer that receive from this one, or none.
        """
        assert action.peer is not None
        stage, replica = action.peer
        here, there = assignment[action.stage][action.replica], assignment[stage][replica]
        sends = action.kind in SENDS
        is_gradient = action.kind in (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT)
        link = (action.stage, stage) if action.stage < stage else (stage, action.stage)
        ways = _ways(here, there) if sends else _ways(there, here)
        own = here.ranks[device]
        return tuple(
            Channel(source, target, link, is_gradient)
            for source, target in ways
            if own == (source if sends else target)
        )

    @property
    def rank_link(self) -> RankLink:
        """What the channel shares with those of other stages between the two ranks."""
        return self.source, self.target, self.is_gradient

    @property
    def is_local(self) -> bool:
        return self.source == self.target

    @property
    def tag(self) -> int:
        """A number that no other channel between the two ranks has: 31 bits, a limit of gloo."""
        source, target = self.link
        assert target < _MOST_STAGES
        return 2 * (source * _MOST_STAGES + target) + self.is_gradient


def _ways(source: WorkerGroup, target: WorkerGroup) -> Iterator[tuple[int, int]]:
    """From which rank each device of the target receives what all devices of the source have."""
    for device, rank in enumerate(target.ranks):
        yield source.ranks[device % len(source.ranks)], rank


def rank_links(assignment: RankAssignment, links: Iterable[StageLink]) -> list[RankLink]:
    """Every pair of ranks that exchange messages, in the same order on all ranks.

    Minibatch b goes from replica b mod r of a stage to b mod q of another; gradients come back.
    """
    pairs = set[RankLink]()
    for source, target in links:
        senders, receivers = assignment[source], assignment[target]
        for b in range(lcm(len(senders), len(receivers))):
            sender, receiver = senders[b % len(senders)], receivers[b % len(receivers)]
            pairs |= {(*way, False) for way in _ways(sender, receiver)}
            pairs |= {(*way, True) for way in _ways(receiver, sender)}
    return sorted(pair for pair in pairs if pair[0] != pair[1])

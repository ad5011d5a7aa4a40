"""Channels of messages between ranks: the transport uses them, the checker proves their order."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import lcm
from typing import NamedTuple, TypeAlias

from pipedream.graph.plan import RankAssignment
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
    def of(action: Action, assignment: RankAssignment, device: int = 0, peer: int = 0) -> Channel:
        """Returns the channel of a message between this device and one of the peer."""
        assert action.peer is not None
        stage, replica = action.peer
        here = assignment[action.stage][action.replica].ranks[device]
        there = assignment[stage][replica].ranks[peer]
        sends = action.kind in SENDS
        is_gradient = action.kind in (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT)
        link = (action.stage, stage) if action.stage < stage else (stage, action.stage)
        return Channel(*((here, there) if sends else (there, here)), link, is_gradient)

    @property
    def rank_link(self) -> RankLink:
        """Returns what the channel shares with those of other stages between the two ranks."""
        return self.source, self.target, self.is_gradient

    @property
    def is_local(self) -> bool:
        return self.source == self.target

    @property
    def tag(self) -> int:
        """Returns a number of its own between the two ranks: 31 bits, a limit of gloo."""
        source, target = self.link
        assert target < _MOST_STAGES
        return 2 * (source * _MOST_STAGES + target) + self.is_gradient


def rank_links(assignment: RankAssignment, links: Iterable[StageLink]) -> list[RankLink]:
    """Returns every pair of ranks that exchange messages, in the same order on all ranks.

    Minibatch b goes from replica b mod r of a stage to b mod q of another; gradients come back.
    """
    pairs = set[RankLink]()
    for source, target in links:
        senders, receivers = assignment[source], assignment[target]
        for b in range(lcm(len(senders), len(receivers))):
            sender, receiver = senders[b % len(senders)], receivers[b % len(receivers)]
            for one, other in product(sender.ranks, receiver.ranks):
                pairs |= {(one, other, False), (other, one, True)}
    return sorted(pair for pair in pairs if pair[0] != pair[1])

"""Which way a message goes. Pure: the transport takes it, the checker proves its order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm
from typing import NamedTuple, TypeAlias

from pipedream.schedule.action import SENDS, Action, Kind, Link

_MOST_STAGES = 1 << 15

RankLink: TypeAlias = tuple[int, int, bool]
"""(source rank, target rank, whether with gradients)."""


class Channel(NamedTuple):
    """One direction of one link, between two ranks or two stages of the same rank.

    `source` and `target` are the ranks that send and receive. Messages arrive in the order in which
    they were sent.
    """

    source: int
    target: int
    link: Link
    is_gradient: bool = False

    @staticmethod
    def of(action: Action, ranks: Sequence[Sequence[int]]) -> Channel:
        """That of a send or receive; `ranks[stage][replica]` is the rank of a worker."""
        assert action.peer is not None
        stage, replica = action.peer
        here, there = ranks[action.stage][action.replica], ranks[stage][replica]
        sends = action.kind in SENDS
        is_gradient = action.kind in (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT)
        link = (action.stage, stage) if action.stage < stage else (stage, action.stage)
        return Channel(*((here, there) if sends else (there, here)), link, is_gradient)

    @property
    def rank_link(self) -> RankLink:
        """What it shares with the other links between the two ranks."""
        return self.source, self.target, self.is_gradient

    @property
    def is_local(self) -> bool:
        return self.source == self.target

    @property
    def tag(self) -> int:
        """A number of its own among the channels of two ranks: 31 bits, as gloo takes it."""
        source, target = self.link
        assert target < _MOST_STAGES
        return 2 * (source * _MOST_STAGES + target) + self.is_gradient


def rank_links(ranks: Sequence[Sequence[int]], links: Iterable[Link]) -> list[RankLink]:
    """All that messages take between ranks, in one order: minibatch b goes from replica b mod r of
    a stage to replica b mod r of another, and its gradients come back.
    """
    found = set[RankLink]()
    for source, target in links:
        senders, receivers = ranks[source], ranks[target]
        for b in range(lcm(len(senders), len(receivers))):
            sender, receiver = senders[b % len(senders)], receivers[b % len(receivers)]
            found |= {(sender, receiver, False), (receiver, sender, True)}
    return sorted(rank_link for rank_link in found if rank_link[0] != rank_link[1])

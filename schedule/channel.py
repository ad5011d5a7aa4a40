"""Channels of messages between ranks, and the communicators that carry them and sums: the transport
uses them, the checker proves their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from math import lcm
from typing import NamedTuple, TypeAlias

from pipedream.graph.plan import RankAssignment, WorkerGroup
from pipedream.schedule.action import SENDS, Action, Kind, StageLink

_MOST_STAGES = 1 << 15

Ranks: TypeAlias = tuple[int, ...]

TeamLink: TypeAlias = tuple[Ranks, Ranks, bool]
"""(ranks that send, ranks that receive, whether gradients): one rank each, or those of a mesh."""


class Channel(NamedTuple):
    """One direction of one link, between two ranks or two stages of the same rank.

    `source` and `target` are the ranks that send and receive. Messages arrive in order. `teams`: of
    both, where several ranks are a worker.
    """

    source: int
    target: int
    link: StageLink
    is_gradient: bool = False
    teams: tuple[Ranks, Ranks] | None = None

    @staticmethod
    def of(action: Action, assignment: RankAssignment, device: int = 0, peer: int = 0) -> Channel:
        """Returns the channel of a message between this device and one of the peer."""
        assert action.peer is not None
        stage, replica = action.peer
        here = assignment[action.stage][action.replica].ranks
        there = assignment[stage][replica].ranks
        ends = (here[device], there[peer]), (here, there)
        if action.kind not in SENDS:
            ends = (there[peer], here[device]), (there, here)
        is_gradient = action.kind in (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT)
        link = (action.stage, stage) if action.stage < stage else (stage, action.stage)
        teams = ends[1] if len(here) > 1 or len(there) > 1 else None
        return Channel(*ends[0], link, is_gradient, teams)

    @property
    def team_link(self) -> TeamLink:
        """Returns what the channel shares with those of other stages, and other ranks, between the
        two workers.
        """
        sources, targets = self.teams or ((self.source,), (self.target,))
        return sources, targets, self.is_gradient

    @property
    def is_local(self) -> bool:
        return self.source == self.target

    @property
    def tag(self) -> int:
        """Returns a number of its own between the two ranks: 31 bits, a limit of gloo."""
        source, target = self.link
        assert target < _MOST_STAGES
        return 2 * (source * _MOST_STAGES + target) + self.is_gradient


def team_links(assignment: RankAssignment, links: Iterable[StageLink]) -> list[TeamLink]:
    """Returns every pair of workers that exchange messages, in the same order on all ranks.

    Minibatch b goes from replica b mod r of a stage to b mod q of another; gradients come back. The
    stages of a rank hand over what they have for each other.
    """
    pairs = set[tuple[WorkerGroup, WorkerGroup]]()
    for source, target in links:
        senders, receivers = assignment[source], assignment[target]
        for b in range(lcm(len(senders), len(receivers))):
            pairs.add((senders[b % len(senders)], receivers[b % len(receivers)]))
    apart = [(one.ranks, other.ranks) for one, other in pairs if one.ranks != other.ranks]
    there = [(one, other, False) for one, other in apart]
    return sorted({*there, *((other, one, True) for one, other, _ in there)})


class Use(StrEnum):
    """What a communicator is for. Operations of one use have one order on all of its ranks; those
    of different uses have not, so that these never share a communicator.
    """

    SUMS = "sums"
    TIED_SUMS = "sums of tied parameters"
    EXCHANGE = "exchange"
    GRADIENT_MESSAGES = "messages back"
    ACTIVATION_MESSAGES = "messages"
    NORMS = "norms"


class Communicator(NamedTuple):
    """`ranks` that use it; of messages first those that send, and in `receivers` those that receive
    them.
    """

    use: Use
    ranks: Ranks
    receivers: Ranks = ()

    @staticmethod
    def of_link(link: TeamLink) -> Communicator:
        senders, receivers, is_gradient = link
        use = Use.GRADIENT_MESSAGES if is_gradient else Use.ACTIVATION_MESSAGES
        return Communicator(use, senders, receivers)

    @property
    def members(self) -> list[int]:
        """Returns all its ranks, in ascending order."""
        return sorted({*self.ranks, *self.receivers})

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Returns the ranks that messages go from and to."""
        receivers = self.ranks if self.use is Use.EXCHANGE else self.receivers
        return [(one, other) for one in self.ranks for other in receivers if one != other]


def among(ranks: Iterable[int], use: Use) -> Communicator:
    """Returns that of ranks which all do the same."""
    return Communicator(use, tuple(sorted(ranks)))

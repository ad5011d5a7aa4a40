"""Which way a message goes. Pure: the transport takes it, the checker proves its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipedream.runtime.action import SENDS, Action, Kind, Link

_MOST_STAGES = 1 << 15


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
    def is_local(self) -> bool:
        return self.source == self.target

    @property
    def tag(self) -> int:
        """A number of its own among the channels of two ranks: 31 bits, as gloo takes it."""
        source, target = self.link
        assert target < _MOST_STAGES
        return 2 * (source * _MOST_STAGES + target) + self.is_gradient

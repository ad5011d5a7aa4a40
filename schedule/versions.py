"""Which versions of its weights a worker needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pipedream.schedule.action import Action, Kind


def uses(actions: Iterable[Action]) -> Counter[int]:
    """Returns how many minibatches run on each version of a worker's weights, given its actions."""
    return Counter(action.version for action in actions if action.kind is Kind.FORWARD)


class Versions:
    """The versions of a worker's weights that exist as it goes through its actions: the newest, and
    those on which a minibatch has yet to go backward, in flight or still to come.
    """

    def __init__(self, actions: Iterable[Action]) -> None:
        self.left = uses(actions)
        self.newest = 0
        self.alive = {0}

    def gone_backward(self, version: int) -> None:
        """Called when a minibatch on `version` has gone backward."""
        self.left[version] -= 1
        if not self.left[version] and version != self.newest:
            self.alive.remove(version)

    def updated(self) -> None:
        """Called when there is a new version."""
        if not self.left[self.newest]:
            self.alive.remove(self.newest)
        self.newest += 1
        self.alive.add(self.newest)

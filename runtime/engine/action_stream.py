"""What a rank does in a segment, action by action; what lies far enough ahead may still change."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipedream.runtime.engine.training_segment import TrainingSegment
from pipedream.schedule.action import Action


@dataclass(eq=False)
class ActionStream:
    """The actions of one rank in a segment, with the numbers that its minibatches have in the
    epoch.

    The engine commits them as it goes: it performs what is committed, and has posted its receives.
    Another thread may hold the stream, look how far it is committed, and let it go on as another
    segment. `delays` says of minibatches by how many updates their weights will be old, where the
    weights are to be predicted.
    """

    segment: TrainingSegment
    actions: Sequence[Action]
    delays: Mapping[int, int] = field(default_factory=dict)
    committed: int = 0

    def __post_init__(self) -> None:
        self.changing = threading.Condition()
        self.held = False

    def commit(self, position: int, most: int) -> int:
        """Settles `most` actions from `position` on; how many are committed by now.

        While the stream is held that may be fewer, and if it would be none it waits. So there are
        none left where the answer is `position`.
        """
        with self.changing:
            self.changing.wait_for(lambda: not self.held or self.committed > position)
            if not self.held:
                self.committed = max(self.committed, min(position + most, len(self.actions)))
            return self.committed

    def hold(self) -> int:
        """Nothing more is committed; how many minibatches of the segment, its first ones, may be
        touched by what is.
        """
        with self.changing:
            self.held = True
            touched = (action.minibatch for action in self.actions[: self.committed])
            return max(touched, default=self.segment.begin - 1) + 1 - self.segment.begin

    def go_on(self, other: ActionStream | None = None) -> None:
        """As it was or, from here on, as the other, which has to begin with what is committed."""
        with self.changing:
            if other is not None:
                assert other.actions[: self.committed] == self.actions[: self.committed]
                self.segment, self.actions, self.delays = other.segment, other.actions, other.delays
            self.held = False
            self.changing.notify_all()

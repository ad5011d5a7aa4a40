"""What a rank does in a leg, action by action; what lies far enough ahead may still change."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipedream.runtime.engine.training_segment import Leg
from pipedream.schedule.action import Action


@dataclass(eq=False)
class Course:
    """The actions of one rank in a leg, with the numbers that its minibatches have in the epoch.

    The engine settles them as it goes: it performs what is settled, and has posted its receives.
    Another thread may hold the course, look how far it is settled, and let it go on as another
    leg. `delays` says of minibatches by how many updates their weights will be old, where the
    weights are to be predicted.
    """

    leg: Leg
    actions: Sequence[Action]
    delays: Mapping[int, int] = field(default_factory=dict)
    settled: int = 0

    def __post_init__(self) -> None:
        self.changing = threading.Condition()
        self.held = False

    def settle(self, position: int, most: int) -> int:
        """Settles `most` actions from `position` on; how many are settled by now.

        While the course is held that may be fewer, and if it would be none it waits. So there are
        none left where the answer is `position`.
        """
        with self.changing:
            self.changing.wait_for(lambda: not self.held or self.settled > position)
            if not self.held:
                self.settled = max(self.settled, min(position + most, len(self.actions)))
            return self.settled

    def hold(self) -> int:
        """Nothing more is settled; how many minibatches of the leg, its first ones, may be touched
        by what is.
        """
        with self.changing:
            self.held = True
            touched = (action.minibatch for action in self.actions[: self.settled])
            return max(touched, default=self.leg.begin - 1) + 1 - self.leg.begin

    def go_on(self, other: Course | None = None) -> None:
        """As it was or, from here on, as the other, which has to begin with what is settled."""
        with self.changing:
            if other is not None:
                assert other.actions[: self.settled] == self.actions[: self.settled]
                self.leg, self.actions, self.delays = other.leg, other.actions, other.delays
            self.held = False
            self.changing.notify_all()

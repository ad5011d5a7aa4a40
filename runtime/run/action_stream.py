"""The actions of a rank in a segment; those far enough ahead may still change."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipedream.runtime.run.training_segment import TrainingSegment
from pipedream.schedule.action import Action


@dataclass(frozen=True)
class Lateness:
    """What corrections have to know of late gradients; empty where nothing asks for it.

    `delays`, where weights are predicted: by how many updates those of each minibatch, as numbered
    in the epoch, will be old. `makes_good`, with error feedback: `Schedule.makes_good`, of updates
    counted from the beginning of the segment.
    """

    delays: Mapping[int, int] = field(default_factory=dict)
    makes_good: Mapping[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class ActionStream:
    """The actions of one rank in a segment, whose minibatches are numbered as in the epoch.

    The engine commits actions before it performs them or posts their receives. Another thread may
    hold the stream, see how far it is committed, and let it go on with the actions of another
    segment.
    """

    segment: TrainingSegment
    actions: Sequence[Action]
    lateness: Lateness = field(default_factory=Lateness)
    committed: int = 0

    def __post_init__(self) -> None:
        self.changing = threading.Condition()
        self.on_hold = False

    def commit(self, position: int, most: int) -> int:
        """Commits up to `most` actions from `position` on. Returns how many are committed by now.

        While the stream is held this may be fewer; if it would be none, it waits. So the stream is
        at its end if the result is `position`.
        """
        with self.changing:
            self.changing.wait_for(lambda: not self.on_hold or self.committed > position)
            if not self.on_hold:
                self.committed = max(self.committed, min(position + most, len(self.actions)))
            return self.committed

    def hold(self) -> int:
        """Stops commits. Returns how many of the segment's minibatches are touched at most."""
        with self.changing:
            self.on_hold = True
            touched = (action.minibatch for action in self.actions[: self.committed])
            return max(touched, default=self.segment.begin - 1) + 1 - self.segment.begin

    def go_on(self, other: ActionStream | None = None) -> None:
        """Allows commits again: of a stream that begins with what is committed, if given."""
        with self.changing:
            if other is not None:
                assert other.actions[: self.committed] == self.actions[: self.committed]
                self.segment, self.actions = other.segment, other.actions
                self.lateness = other.lateness
            self.on_hold = False
            self.changing.notify_all()

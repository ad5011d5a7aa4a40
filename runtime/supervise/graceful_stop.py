"""Ctrl-C: the ranks agree where the run stops, drain the pipeline there, and save.

Somebody asks: the launcher, or a signal that came to one of the ranks. Then no rank settles any
action more, and each tells rank 0 how far it is. Rank 0 chooses the place: after whole updates, and
so far ahead of all ranks that the schedule of the shortened leg begins, on each of them, with what
is settled. With that schedule they go on, and it ends with an empty pipeline. Threads do all this,
so that a rank answers while it waits for another one's message; the compute goes on meanwhile.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import astuple
from types import FrameType

from torch._C._distributed_c10d import Store

from pipedream.comm.launcher import Place
from pipedream.comm.store_messages import from_first, hear, tell
from pipedream.runtime.engine.action_stream import Course
from pipedream.runtime.engine.training_segment import Leg, Position, Standing, place_to_stop
from pipedream.runtime.supervise.launch import ASKING, draining
from pipedream.schedule.policy import Policy

_SECONDS_BETWEEN_LOOKS = 0.2


class Halt:
    """One rank's part of it. `at`: where the run stops, once that is known.

    `launcher_asks` is None where no launcher of ours asks: then the first signal does, and the
    second one is what it would have been. `store`: it has a connection of its own to it.
    """

    def __init__(
        self,
        store: Store,
        place: Place,
        policy: Policy,
        launcher_asks: Callable[[], bool] | None,
    ) -> None:
        own: Store = store.clone()  # type: ignore[attr-defined]
        self.store, self.place, self.policy = own, place, policy
        self.launcher_asks = launcher_asks
        self.at: Position | None = None
        self.changing = threading.Condition()
        self.held = False
        self.position = Position(0)
        self.course: Course | None = None
        self.make: Callable[[Leg], Course] | None = None
        self.signalled: int | None = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._attend, name="halt", daemon=True)
        self.before = {} if launcher_asks else {n: signal.signal(n, self._catch) for n in ASKING}

    def depart(self, epoch: int, leg: Leg, course: Callable[[Leg], Course]) -> Course | None:
        """What to do in the leg, which may become a shorter one meanwhile; None if the run stops
        here. `course` makes it of a leg, in this thread or another.
        """
        with self.changing:
            self.changing.wait_for(lambda: not self.held)
            self.position, self.make = Position(epoch, leg.begin), course
            if self.at == self.position:
                return None
            self.course = course(self._shortened(leg))
            if self.thread.ident is None:
                self.thread.start()
            return self.course

    def rests(self, end: Position, onward: Position) -> bool:
        """Whether the run stops at the `end` of a leg, where the pipeline is empty and this rank
        has saved. Else it goes on from `onward`: after an epoch that is the next one.
        """
        with self.changing:
            self.changing.wait_for(lambda: not self.held)
            self.position, self.course = onward, None
            return self.at == end

    def end(self) -> None:
        """All ranks have trained all there is, or have stopped."""
        self.ended.set()
        self._leave_signals()

    def _attend(self) -> None:
        try:
            if self._is_asked():
                standings = self._told(self._hold())
                chosen = place_to_stop(standings, self.policy)
                at = from_first(self.store, self.place, "halt/at", astuple(chosen))
                self._go_on(Position(*at))
        except RuntimeError:  # the store is gone: who waits for a message will say so
            self._go_on(None)

    def _is_asked(self) -> bool:
        """Waits until somebody asks; False if nobody has before the end."""
        while not self._hears():
            if self.ended.wait(_SECONDS_BETWEEN_LOOKS):
                return False
        return True

    def _hears(self) -> bool:
        if self.launcher_asks is not None:
            return self.launcher_asks()
        if self.signalled is not None:
            self.store.set("halt/asked", str(self.signalled))
        return self.store.check(["halt/asked"])

    def _hold(self) -> Standing:
        with self.changing:
            self.held = True
            if self.course is None:
                return Standing(self.position)
            return Standing(self.position, self.course.leg, self.course.hold())

    def _told(self, own: Standing) -> list[Standing]:
        """Those of all ranks, for rank 0; the others tell theirs."""
        if self.place.rank > 0:
            tell(self.store, f"halt/{self.place.rank}", own.told)
            return [own]
        if self.launcher_asks is None:
            number = int(self.store.get("halt/asked"))
            print(f"pd-train: {draining(number)}", file=sys.stderr, flush=True)
        others = range(1, self.place.world_size)
        return [own, *(Standing.of(hear(self.store, f"halt/{rank}")) for rank in others)]

    def _go_on(self, at: Position | None) -> None:
        with self.changing:
            self.at = at
            if self.course is not None and self.make is not None:
                shorter = self._shortened(self.course.leg)
                changed = shorter != self.course.leg
                self.course.go_on(self.make(shorter) if changed else None)
            self.held = False
            self.changing.notify_all()

    def _shortened(self, leg: Leg) -> Leg:
        if self.at is None or self.at.epoch != self.position.epoch:
            return leg
        end = self.at.minibatch
        return Leg(leg.begin, end) if leg.begin < end < leg.end else leg

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        self.signalled = number
        self._leave_signals()

    def _leave_signals(self) -> None:
        while self.before:
            signal.signal(*self.before.popitem())

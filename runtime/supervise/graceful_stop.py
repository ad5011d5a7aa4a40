"""Graceful stop at Ctrl-C: the ranks agree where the run stops, drain the pipeline there, and save.

The launcher asks for it, or a signal to one of the ranks. Then no rank commits further actions, and
each sends its progress to rank 0. Rank 0 chooses the position: after whole updates, and so far
ahead of all ranks that the schedule of the shortened segment begins, on each of them, with what is
committed. They go on with that schedule, which ends with an empty pipeline. Threads do all this, so
that a rank answers while it waits for a message; computation continues meanwhile.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import astuple
from types import FrameType

from torch._C._distributed_c10d import Store

from pipedream.comm.rank_info import RankInfo
from pipedream.comm.store_messages import broadcast, receive_message, send_message
from pipedream.runtime.run.action_stream import ActionStream
from pipedream.runtime.run.training_segment import (
    Position,
    RankProgress,
    TrainingSegment,
    stopping_position,
)
from pipedream.runtime.supervise.launch import ASKING, draining
from pipedream.schedule.policy import Policy

_SECONDS_BETWEEN_LOOKS = 0.2


class GracefulStop:
    """One rank's part in a graceful stop. `at`: where the run stops, once that is known.

    `launcher_asks` is None if the ranks were not started by `spawn`: then the first signal asks,
    and the second one has its usual effect. It uses its own connection to the `store`.
    """

    def __init__(
        self,
        store: Store,
        rank_info: RankInfo,
        policy: Policy,
        launcher_asks: Callable[[], bool] | None,
    ) -> None:
        own: Store = store.clone()  # type: ignore[attr-defined]
        self.store, self.rank_info, self.policy = own, rank_info, policy
        self.launcher_asks = launcher_asks
        self.at: Position | None = None
        self.changing = threading.Condition()
        self.on_hold = False
        self.position = Position(0)
        self.stream: ActionStream | None = None
        self.make: Callable[[TrainingSegment], ActionStream] | None = None
        self.signalled: int | None = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._attend, name="graceful-stop", daemon=True)
        self.before = {} if launcher_asks else {n: signal.signal(n, self._catch) for n in ASKING}

    def begin_segment(
        self,
        epoch: int,
        segment: TrainingSegment,
        stream: Callable[[TrainingSegment], ActionStream],
    ) -> ActionStream | None:
        """Returns the actions of a segment, perhaps shortened; None if the run stops here.

        `stream` makes the actions of a segment, in this thread or another.
        """
        with self.changing:
            self.changing.wait_for(lambda: not self.on_hold)
            self.position, self.make = Position(epoch, segment.begin), stream
            if self.at == self.position:
                return None
            self.stream = stream(self._shortened(segment))
            if self.thread.ident is None:
                self.thread.start()
            return self.stream

    def stops_at(self, end: Position, onward: Position) -> bool:
        """Returns whether the run stops at the `end` of a segment, which this rank has saved.

        Otherwise it continues from `onward`, which after an epoch is the next one.
        """
        with self.changing:
            self.changing.wait_for(lambda: not self.on_hold)
            self.position, self.stream = onward, None
            return self.at == end

    def end(self) -> None:
        """Called when all ranks have trained everything, or have stopped."""
        self.ended.set()
        self._leave_signals()

    def _attend(self) -> None:
        try:
            while not self._hears():
                if self.ended.wait(_SECONDS_BETWEEN_LOOKS):
                    return
            progress = self._collect(self._hold())
            chosen = stopping_position(progress, self.policy)
            at = broadcast(self.store, self.rank_info, "stop/at", astuple(chosen))
            self._go_on(Position(*at))
        except RuntimeError:  # the store is gone: who waits for a message will say so
            self._go_on(None)

    def _hears(self) -> bool:
        if self.launcher_asks is not None:
            return self.launcher_asks()
        if self.signalled is not None:
            self.store.set("stop/asked", str(self.signalled))
        return self.store.check(["stop/asked"])

    def _hold(self) -> RankProgress:
        with self.changing:
            self.on_hold = True
            if self.stream is None:
                return RankProgress(self.position)
            return RankProgress(self.position, self.stream.segment, self.stream.hold())

    def _collect(self, own: RankProgress) -> list[RankProgress]:
        """Returns the progress of all ranks on rank 0; the others send theirs."""
        if self.rank_info.rank > 0:
            send_message(self.store, f"stop/{self.rank_info.rank}", own.as_json)
            return [own]
        if self.launcher_asks is None:
            number = int(self.store.get("stop/asked"))
            print(f"pd-train: {draining(number)}", file=sys.stderr, flush=True)
        ranks = range(1, self.rank_info.world_size)
        others = (receive_message(self.store, f"stop/{rank}") for rank in ranks)
        return [own, *(RankProgress.of(fields) for fields in others)]

    def _go_on(self, at: Position | None) -> None:
        with self.changing:
            self.at = at
            if self.stream is not None and self.make is not None:
                shorter = self._shortened(self.stream.segment)
                changed = shorter != self.stream.segment
                self.stream.go_on(self.make(shorter) if changed else None)
            self.on_hold = False
            self.changing.notify_all()

    def _shortened(self, segment: TrainingSegment) -> TrainingSegment:
        if self.at is None or self.at.epoch != self.position.epoch:
            return segment
        end = self.at.minibatch
        return TrainingSegment(segment.begin, end) if segment.begin < end < segment.end else segment

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        self.signalled = number
        self._leave_signals()

    def _leave_signals(self) -> None:
        while self.before:
            signal.signal(*self.before.popitem())

"""How far a GPU has come with what its rank has given it.

With NCCL the host waits for nothing: a rank whose kernel or collective hangs goes on, and beats. So
an event is recorded behind each action. While there is one that is not reached, and none is for the
run's timeout, the rank counts as one that was stopped. A rank that has given its GPU nothing, since
it waits for data, saves or evaluates on the host, has no such event.

All who wait for a rank stand still with it. Their GPUs are at a receive or a sum, that of the rank
at fault is at a pass or an update. So who waits is given twice as long: by then the other was
found, or nobody is known to be behind. The devices of a mesh wait for one another within a pass:
there the one at fault may be any of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from pipedream.schedule.action import RECEIVES, Action, Kind

_SECONDS_BETWEEN_LOOKS = 0.2
_NOTICE_SECONDS = 2.0  # until those who watch this rank have seen that it stands still
_AT_ONCE = 0.001  # seconds: an event that was reached before one waited for it
_WAITS = RECEIVES | {Kind.ALL_REDUCE, Kind.NORM}


class DeviceEvent(Protocol):
    """What torch.cuda.Event has of it."""

    def record(self) -> None:
        """Puts it behind all that this thread has given to the device."""

    def synchronize(self) -> None:
        """Returns when the device has reached it."""


class _Place(NamedTuple):
    """What the device does, in words; `waits`: for other ranks."""

    words: str
    waits: bool


class DeviceProgress:
    """The events of one rank, `make` makes them; `timeout` in seconds.

    The engine calls `begin` and `given` around each action, a thread follows the events, and those
    who tell others that the rank lives `look` at it.
    """

    def __init__(
        self,
        make: Callable[[], DeviceEvent],
        timeout: float,
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        """`enter` is called in the thread that follows the events."""
        self.make, self.timeout, self.enter = make, timeout, enter
        self.words = ""
        self.begun: _Place | None = None
        self.ahead: deque[tuple[DeviceEvent, _Place]] = deque()
        self.spare: deque[DeviceEvent] = deque()
        self.at: _Place | None = None
        self.reached = self.seen = 0
        self.still = 0.0
        threading.Thread(target=self._follow, name="device", daemon=True).start()

    @staticmethod
    def of(device: torch.device, timeout: float) -> DeviceProgress | None:
        """Returns that of a GPU; None for a CPU, where a rank that hangs does not answer."""
        if device.type != "cuda":
            return None
        # To wait for an event that is not `blocking` keeps a core busy.
        return DeviceProgress(
            lambda: torch.cuda.Event(blocking=True),  # type: ignore[no-untyped-call]
            timeout,
            lambda: torch.cuda.set_device(device),  # else the thread would begin to use GPU 0
        )

    def begin(self, action: Action) -> None:
        """Notes that an action begins, at what was last set as `words`."""
        self.begun = _Place(self.words, action.kind in _WAITS)

    def given(self) -> None:
        """Notes that the device has been given all of that action."""
        assert self.begun is not None
        place, self.begun = self.begun, None
        self._record(place)

    def look(self, seconds: float) -> str | None:
        """Returns what is wrong with this rank, in words that follow its name, or None.

        `seconds`: how long this process has been running since the last call.
        """
        at, reached = self.at, self.reached
        waited = at is not None and reached == self.seen
        self.still = self.still + seconds if waited else 0.0
        self.seen = reached
        if at is None:
            return None
        if not at.waits and self.still > max(self.timeout - _NOTICE_SECONDS, self.timeout / 2):
            return f"has not responded for {self.timeout:g} s {at.words} (on its GPU)"
        if self.still > 2 * self.timeout:
            seconds = 2 * self.timeout
            return f"has waited for {seconds:g} s {at.words}, and no rank is known to be behind"
        return None

    def _record(self, place: _Place) -> None:
        event = self.spare.popleft() if self.spare else self.make()
        event.record()
        self.ahead.append((event, place))

    def _follow(self) -> None:
        # `query` would hold Python's lock while the driver lets it wait, and with it the threads
        # that say this rank is alive; `synchronize` gives it up.
        self.enter()
        while True:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            begun = self.begun
            if begun is not None and not self.ahead:  # the host may be blocked amid an action
                self._record(begun)
            try:
                self._catch_up()
            except RuntimeError:  # CUDA has failed: the next operation of the engine says so
                return

    def _catch_up(self) -> None:
        """Passes the events that were reached already, and waits for one, so that the thread does
        not wake up for each of them.
        """
        late = False
        while self.ahead and not late:
            event, self.at = self.ahead[0]
            begin = time.monotonic()
            event.synchronize()
            late = time.monotonic() - begin > _AT_ONCE
            self.ahead.popleft()
            self.spare.append(event)
            self.reached += 1
        self.at = None

"""When a rank did its actions, by its own clock (`time.perf_counter`).

A call on a GPU returns when the work has been handed over. So the stream of the engine gets a CUDA
event before and after each action, which holds when the device came to it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

import torch

from pipedream.comm.device.events import timed_event
from pipedream.graph.timeline import Event
from pipedream.schedule.action import Action

_TRIES = 8
"""Readings of a GPU's clock, of which the quickest counts."""

_SPAN = 1.0
"""Seconds over which one event is measured from another: CUDA tells them as a 32-bit float, which
rounds them to less than 0.1 µs then."""


class ActionTimes:
    """`events` of the actions that are done, in order: on a CPU, those that have been called.

    `begin` and `end` stand around the actions of a segment.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    @staticmethod
    def on(device: torch.device) -> ActionTimes:
        """Returns those of a rank that computes on this device."""
        return DeviceTimes(device) if device.type == "cuda" else ActionTimes()

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def mark(self) -> Any:
        """Returns the beginning of an action, for `add`."""
        return time.perf_counter()

    def add(self, action: Action, begin: Any) -> None:
        """Adds an action that has been called, and begun at this mark."""
        self.events.append(Event(action, begin, time.perf_counter()))

    def under_way(self, called: Action | None) -> Action | None:
        """Returns the action that the device is at; `called` is the last one, if it goes on. Any
        thread may ask.
        """
        return called


class _Reading(NamedTuple):
    """An event in the stream, and when by the rank's clock the device came to it, in seconds."""

    event: torch.cuda.Event
    seconds: float


class DeviceTimes(ActionTimes):
    """On a GPU: when the current stream of `device` came to the beginning and the end of an action.

    Of a receive or a sum that is how long the stream waited for it. Only `begin` and `end` of a
    segment, when nothing is under way, wait for the device; in between, events are read once it has
    passed them. Its clock and the rank's are compared at both, and drift evenly in between.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.pending: deque[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = deque()
        self.reading = threading.Lock()  # of events that have passed, by the engine or `under_way`

    def begin(self) -> None:
        self.first = self.known = self._read_clocks()

    def end(self) -> None:
        """Sets the events of the segment right by how the clocks have drifted apart."""
        last = self._read_clocks()
        self._take()
        assert not self.pending, "a stream has passed all events before the one waited for"
        first, seconds = self.first.seconds, self._seconds(last.event)
        rate = (last.seconds - first) / (seconds - first)
        for place in reversed(range(len(self.events))):
            action, begin, end = self.events[place]
            if begin < first:  # of an earlier segment
                break
            moved = (first + rate * (moment - first) for moment in (begin, end))
            self.events[place] = Event(action, *moved)

    def mark(self) -> torch.cuda.Event:
        return timed_event(self.device)

    def add(self, action: Action, begin: torch.cuda.Event) -> None:
        self.pending.append((action, begin, self.mark()))
        self._take()

    def under_way(self, called: Action | None) -> Action | None:
        with torch.cuda.device(self.device):  # else a thread begins to use the first GPU
            self._take()
        pending = next(iter(self.pending.copy()), None)
        return called if pending is None else pending[0]

    def _take(self) -> None:
        """Adds the actions that the device has done to `events`. Does not wait."""
        with self.reading:
            while self.pending and self.pending[0][2].query():  # type: ignore[no-untyped-call]
                action, begin, end = self.pending[0]
                self.events.append(Event(action, self._seconds(begin), self._seconds(end)))
                self.pending.popleft()

    def _seconds(self, event: torch.cuda.Event) -> float:
        """Returns when the device came to an event, later than all asked for before."""
        since = float(self.known.event.elapsed_time(event)) / 1e3
        assert since >= 0, "events are asked for in the order of the stream"
        seconds = self.known.seconds + since
        if since > _SPAN:
            self.known = _Reading(event, seconds)
        return seconds

    def _read_clocks(self) -> _Reading:
        """Waits for the device, and reads its clock and the rank's at one moment."""
        tries = []
        for _ in range(_TRIES):
            before = time.perf_counter()
            event = self.mark()
            event.synchronize()
            after = time.perf_counter()
            tries.append((after - before, _Reading(event, (before + after) / 2)))
        return min(tries, key=lambda each: each[0])[1]

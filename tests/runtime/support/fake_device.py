"""A device that does at once what it is given, until it hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable


class FakeDevice:
    """From `hang` on it reaches nothing that it is given; `given` may be overridden to call it."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.events = 0

    def hang(self) -> None:
        self.goes_on.clear()

    def given(self) -> None:
        """Called before an event is recorded."""

    def event(self) -> FakeEvent:
        self.events += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.behind: Callable[[], object] = lambda: None

    def record(self) -> None:
        """Given to a device that hangs, it is not reached until that goes on."""
        self.device.given()
        hangs = not self.device.goes_on.is_set()
        self.behind = self.device.goes_on.wait if hangs else lambda: None

    def synchronize(self) -> None:
        self.behind()

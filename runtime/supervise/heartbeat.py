"""Where each worker is, for the launcher to see: a record for each in memory that they share.

A thread of each worker counts up; where the count stands still the worker has been stopped. The
words say what the worker is doing, and who has lost whom. In the other direction goes one bit: the
launcher asks them to stop. The memory has no name in any folder and
goes with the last process that knows it.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from dataclasses import dataclass

SECONDS_BETWEEN_HEARTBEATS = 0.2

_SIZE = 256
_HEAD = struct.Struct("<qqH")  # beats, 1 + the rank lost or 0, bytes of the words that follow
_WORDS = _SIZE - _HEAD.size


@dataclass(frozen=True)
class Heartbeat:
    """What one worker has told last."""

    count: int
    lost: int | None
    words: str


class Heartbeats:
    """The records of all ranks; each writes its own, the launcher reads them."""

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, 0)

    @staticmethod
    def make(workers: int) -> int:
        """A descriptor of fresh memory, to be handed to the workers."""
        descriptor = os.memfd_create("pipedream-heartbeats")
        os.ftruncate(descriptor, workers * _SIZE + 1)
        return descriptor

    def request_stop(self) -> None:
        """The launcher asks all workers to save and leave where they next can."""
        self.memory[-1] = 1

    @property
    def stop_requested(self) -> bool:
        return self.memory[-1] == 1

    def of(self, rank: int) -> Heartbeat:
        count, lost, length = _HEAD.unpack_from(self.memory, rank * _SIZE)
        begin = rank * _SIZE + _HEAD.size
        words = self.memory[begin : begin + length].decode(errors="replace")
        return Heartbeat(count, lost - 1 if lost else None, words)

    def report(self, rank: int, words: str) -> None:
        text = words.encode()[:_WORDS]
        begin = rank * _SIZE + _HEAD.size
        self.memory[begin : begin + len(text)] = text
        struct.pack_into("<H", self.memory, begin - 2, len(text))

    def report_lost(self, rank: int, lost: int) -> None:
        """`rank` has lost `lost`."""
        struct.pack_into("<q", self.memory, rank * _SIZE + 8, lost + 1)

    def beat(self, rank: int) -> None:
        count = struct.unpack_from("<q", self.memory, rank * _SIZE)[0]
        struct.pack_into("<q", self.memory, rank * _SIZE, count + 1)

    def start_beating(self, rank: int) -> None:
        """In a thread, until this process ends."""

        def go_on() -> None:
            while True:
                self.beat(rank)
                pause.wait(SECONDS_BETWEEN_HEARTBEATS)

        pause = threading.Event()
        threading.Thread(target=go_on, name="heartbeat", daemon=True).start()

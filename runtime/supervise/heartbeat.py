"""Heartbeats of the workers, for the launcher: one record per worker in shared memory.

A thread of each worker counts up; a count that stands still means that the worker was stopped. The
record also has what the worker is doing, in words, and whom it has lost. In the other direction
goes one bit: the launcher's request to stop. The memory is freed with its last process.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass

SECONDS_BETWEEN_HEARTBEATS = 0.2

_SIZE = 256
_HEAD = struct.Struct("<qqH")  # beats, 1 + the rank lost or 0, bytes of the words that follow
_WORDS = _SIZE - _HEAD.size


@dataclass(frozen=True)
class Heartbeat:
    """The record of one worker."""

    count: int
    lost: int | None
    words: str


class Heartbeats:
    """The records of all ranks; each writes its own, the launcher reads them."""

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, 0)

    @staticmethod
    def make(workers: int) -> int:
        """Returns a descriptor of fresh memory, to be passed to the workers."""
        descriptor = os.memfd_create("pipedream-heartbeats")
        os.ftruncate(descriptor, workers * _SIZE + 1)
        return descriptor

    def request_stop(self) -> None:
        """Asks all workers to save and exit at the next opportunity."""
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
        """Sets what `rank` is doing, in words."""
        text = words.encode()[:_WORDS]
        begin = rank * _SIZE + _HEAD.size
        self.memory[begin : begin + len(text)] = text
        struct.pack_into("<H", self.memory, begin - 2, len(text))

    def report_lost(self, rank: int, lost: int) -> None:
        """Records that `rank` has lost `lost`."""
        struct.pack_into("<q", self.memory, rank * _SIZE + 8, lost + 1)

    def beat(self, rank: int) -> None:
        count = struct.unpack_from("<q", self.memory, rank * _SIZE)[0]
        struct.pack_into("<q", self.memory, rank * _SIZE, count + 1)

    def start_beating(self, rank: int) -> None:
        """Counts up in a thread, until this process ends."""

        def go_on() -> None:
            while True:
                self.beat(rank)
                time.sleep(SECONDS_BETWEEN_HEARTBEATS)

        threading.Thread(target=go_on, name="heartbeat", daemon=True).start()

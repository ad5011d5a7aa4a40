"""Heartbeats of the workers, for the launcher: one record per worker in shared memory.

A thread of each worker counts up; a count that stands still means that the worker was stopped. The
record also has what the worker is doing, in words, whom it has lost, and why it fails. In the other
direction goes one bit: the launcher's request to stop. The memory is freed with its last process.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass

SECONDS_BETWEEN_HEARTBEATS = 0.2

_SIZE, _WORDS = 4096, 256  # bytes of a record, and of the words in it; the cause follows them
_HEAD = struct.Struct("<qqHH")  # beats, 1 + the rank lost or 0, bytes of words and cause
_CAUSE = _SIZE - _HEAD.size - _WORDS


@dataclass(frozen=True)
class Heartbeat:
    """The record of one worker: what it is doing, in `words`, and why it fails, if it does."""

    count: int
    lost: int | None
    words: str
    cause: str


class Heartbeats:
    """The records of all ranks; each writes its own, the launcher reads them."""

    def __init__(self, workers: int) -> None:
        # By its name one sees from outside, in /proc, what the workers of a launcher are doing.
        descriptor = os.memfd_create("pipedream-heartbeats")
        os.ftruncate(descriptor, workers * _SIZE + 1)
        self.memory = mmap.mmap(descriptor, 0)  # shared with all forks
        os.close(descriptor)

    def request_stop(self) -> None:
        """Asks all workers to save and exit at the next opportunity."""
        self.memory[-1] = 1

    @property
    def stop_requested(self) -> bool:
        return self.memory[-1] == 1

    def of(self, rank: int) -> Heartbeat:
        begin = rank * _SIZE
        count, lost, words, cause = _HEAD.unpack_from(self.memory, begin)
        begin += _HEAD.size
        texts = self.memory[begin : begin + words], self.memory[begin + _WORDS :][:cause]
        return Heartbeat(
            count, lost - 1 if lost else None, *(t.decode("utf-8", "replace") for t in texts)
        )

    def report(self, rank: int, words: str) -> None:
        """Sets what `rank` is doing, in words."""
        self._write(rank, 0, words.encode()[:_WORDS], 16)

    def report_cause(self, rank: int, cause: str) -> None:
        """Sets why `rank` fails."""
        self._write(rank, _WORDS, cause.encode()[:_CAUSE], 18)

    def _write(self, rank: int, offset: int, text: bytes, length_at: int) -> None:
        begin = rank * _SIZE + _HEAD.size + offset
        self.memory[begin : begin + len(text)] = text
        struct.pack_into("<H", self.memory, rank * _SIZE + length_at, len(text))

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


def _decoded(text: bytes) -> str:
    return text.decode(errors="replace")

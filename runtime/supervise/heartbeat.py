"""Heartbeats of the workers, for the launcher: one record per worker in shared memory.

A thread of each worker counts up; a count that stands still means that the worker was stopped. The
record also has what the worker is doing, in words, whom it has lost, why it fails, and whether its
GPU stands still. In the other direction goes one bit: the launcher's request to stop. The memory is
freed with its last process.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from ctypes import Structure, c_char, c_int64, sizeof
from dataclasses import dataclass

SECONDS_BETWEEN_HEARTBEATS = 0.2


class _Record(Structure):
    """In shared memory; `lost` is 1 + a rank, or 0."""

    _fields_ = (
        ("count", c_int64),
        ("lost", c_int64),
        ("words", c_char * 256),
        ("cause", c_char * 3072),
        ("hangs", c_char * 512),
    )


@dataclass(frozen=True)
class Heartbeat:
    """The record of one worker: what it is doing, in `words`, and why it fails, if it does.

    `hangs`: what is wrong with its GPU, in words that follow the rank, if anything is.
    """

    count: int
    lost: int | None
    words: str
    cause: str
    hangs: str


class Heartbeats:
    """The records of all ranks; each writes its own, the launcher reads them."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.records = (_Record * (len(memory) // sizeof(_Record))).from_buffer(memory)
        self.look: Callable[[float], str | None] = lambda seconds: None

    @staticmethod
    def make(workers: int) -> Heartbeats:
        """Makes them for this process and all forks of it.

        By the name one finds in /proc what the workers of a launcher are doing.
        """
        descriptor = os.memfd_create("pipedream-heartbeats")
        os.ftruncate(descriptor, workers * sizeof(_Record) + 1)
        memory = mmap.mmap(descriptor, 0)
        os.close(descriptor)
        return Heartbeats(memory)

    def request_stop(self) -> None:
        """Asks all workers to save and exit at the next opportunity."""
        self.memory[-1] = 1

    @property
    def stop_requested(self) -> bool:
        return self.memory[-1] == 1

    def of(self, rank: int) -> Heartbeat:
        record = self.records[rank]
        lost = record.lost - 1 if record.lost else None
        texts = (record.words, record.cause, record.hangs)
        return Heartbeat(record.count, lost, *(text.decode(errors="replace") for text in texts))

    def report(self, rank: int, words: str) -> None:
        """Sets what `rank` is doing, in words."""
        self.records[rank].words = words.encode()[:255]

    def report_cause(self, rank: int, cause: str) -> None:
        """Sets why `rank` fails."""
        self.records[rank].cause = cause.encode()[:3071]

    def report_lost(self, rank: int, lost: int) -> None:
        """Records that `rank` has lost `lost`."""
        self.records[rank].lost = lost + 1

    def start_beating(self, rank: int) -> None:
        """Counts up in a thread, until this process ends, and passes on what `look` finds, which is
        told for how many seconds the process has been running since.
        """

        def go_on() -> None:
            while True:
                record = self.records[rank]
                record.count += 1
                found = self.look(SECONDS_BETWEEN_HEARTBEATS)
                if found is not None:
                    record.hangs = found.encode()[:511]
                time.sleep(SECONDS_BETWEEN_HEARTBEATS)

        threading.Thread(target=go_on, name="heartbeat", daemon=True).start()

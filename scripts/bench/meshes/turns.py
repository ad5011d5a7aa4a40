"""Lets processes that share a core take turns of a quarter of a millisecond.

The kernel looks only in its ticks, of 1 to 4 ms, whether a turn or a quota is used up: processes
of a mesh that share cores would wait for each other's turns at each exchange. So a process on each
core interrupts whatever runs there, for some microseconds, and the kernel looks then. Linux, as
root.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 250e-6
SLICE = 100e-6
"""The least that the kernel takes, and shorter than a turn, which so ends when the kernel looks."""
PRIORITY = 10
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Numbers of the system call, which Python has no function for."""


@contextmanager
def turns() -> Iterator[None]:
    """On all cores that this process may use."""
    words = [sys.executable, __file__]
    running = [subprocess.Popen([*words, str(core)]) for core in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def take_turns() -> None:
    """Has this process, and what it starts, take turns with others, see sched_setattr(2)."""
    words = struct.pack("IIQiIQQQ", 48, os.SCHED_OTHER, 0, 0, 0, round(SLICE * 1e9), 0, 0)
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(SCHED_SETATTR[os.uname().machine], 0, words, 0):
        raise OSError(ctypes.get_errno(), "sched_setattr")


def _interrupt(core: int) -> None:
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    while True:
        time.sleep(SECONDS)


if __name__ == "__main__":
    _interrupt(int(sys.argv[1]))
